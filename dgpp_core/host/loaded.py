"""One model together with the hooks of its own plugin. Whatever a hook does wrong is a `PluginError` that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import pluggy

from dgpp_core.api.bindings import BindingTable
from dgpp_core.api.errors import ConfigError, DgppError, PlanError
from dgpp_core.api.model import Drafter, Model, Shard
from dgpp_core.api.spec import Dialect, ModelConfig, ModelSpec, PlanTerm
from dgpp_core.api.state import StateGroup
from dgpp_core.api.vision import Vision
from dgpp_core.host.problems import Plugin, Problem, raised_at, source_of
from dgpp_core.host.shares import require_divided, require_shares

if TYPE_CHECKING:
    import click

T = TypeVar("T")
MOST_RANKS = 64
"""As many as `dgpp rank` knows."""


class PluginHooks:
    """The hooks of one plugin, each with what it returns checked."""

    def __init__(self, plugin: Plugin, manager: pluggy.PluginManager) -> None:
        self.plugin, self._manager = plugin, manager

    def has(self, hook: str) -> bool:
        """Whether the plugin implements ``hook``."""
        return bool(getattr(self._manager.hook, hook).get_hookimpls())

    def call(self, hook: str, **arguments: object) -> Any:
        """What ``hook`` returns. An error of dgpp's own passes through; any other becomes a `PluginError`."""
        return self.run(getattr(self._manager.hook, hook), hook, self._place(hook), **arguments)

    def run(self, function: Callable[..., T], name: str, place: str, **arguments: object) -> T:
        """Call a function of the plugin; ``name`` and ``place`` say which in an error."""
        try:
            return function(**arguments)
        except DgppError:
            raise
        except Exception as error:
            folder = str(Path(self.plugin.file).parent) if self.plugin.file else ""
            place = raised_at(error, folder) or place
            raise Problem(
                plugin=self.plugin, what=f"`{name}` raised {type(error).__name__}", place=place,
                found=str(error) or type(error).__name__, expected="a result, or an error of dgpp_core.api.errors",
                hint="report it to the plugin's authors, or run with DGPP_DEBUG=1 to see the whole traceback",
            ).error() from error  # fmt: skip

    def struct(self, value: object, kind: type[T], hook: str) -> T:
        """``value``, which must be a struct of ``kind`` with every field of its declared type."""
        if not isinstance(value, kind):
            self.refuse(hook, f"{type(value).__name__}: {value!r}", kind.__name__)
        checked: T = self.convert(value, kind, hook, kind.__name__)
        return checked

    def structs(self, value: object, kind: Any, hook: str, expected: str) -> Any:
        """``value`` as a tuple, which must be a list or tuple of structs of ``kind``; ``expected`` says so in words."""
        if not isinstance(value, list | tuple):
            self.refuse(hook, type(value).__name__, f"a list or tuple of {expected}")
        return self.convert(value, tuple[kind, ...], hook, f"a list or tuple of {expected}")

    def convert(self, value: object, kind: Any, name: str, expected: str, place: str = "") -> Any:
        """``value`` rebuilt field by field: msgspec structs do not check their fields when they are made."""
        try:
            return msgspec.convert(msgspec.to_builtins(value), kind)
        except (msgspec.ValidationError, TypeError, NotImplementedError) as error:
            self.refuse(name, str(error), expected, place)

    def refuse(self, name: str, found: str, expected: str, place: str = "") -> NoReturn:
        """Raise a `PluginError` that ``name`` returned the wrong thing."""
        found = found if len(found) <= 200 else found[:199] + "…"
        place = place or self._place(name)
        what = f"`{name}` returned the wrong thing"
        raise Problem(
            plugin=self.plugin, what=what, place=place, found=found, expected=expected, hint="correct the plugin"
        ).error()

    def models(self) -> tuple[ModelSpec, ...]:
        """The plugin's models; their names are distinct."""
        found = self.call("dgpp_models")
        if not isinstance(found, list | tuple) or not all(isinstance(spec, ModelSpec) for spec in found):
            self.refuse("dgpp_models", _kinds(found), "a list or tuple of ModelSpec")
        for spec in found:
            self._check_spec(spec)
        names = [spec.name for spec in found]
        if twice := {name for name in names if names.count(name) > 1}:
            self.refuse("dgpp_models", f"the name {', '.join(sorted(twice))} twice", "distinct names")
        return tuple(found)

    def _check_spec(self, spec: ModelSpec) -> None:
        data = {name: getattr(spec, name) for name, _ in _DATA}
        self.convert(data, _SpecData, "dgpp_models", f"the fields of ModelSpec (model {spec.name!r})")
        if unknown := set(spec.releases.values()) - set(spec.quantised):
            self.refuse("dgpp_models", f"releases in {', '.join(sorted(unknown))}", "weight formats of `quantised`")
        for name in _FUNCTIONS:
            if not callable(given := getattr(spec, name)) and (given is not None or name == "read_config"):
                self.refuse("dgpp_models", f"{name} = {given!r}", "a function of config.json")

    def commands(self, cli: click.Group) -> None:
        """Let the plugin add its commands to ``cli``."""
        self.call("dgpp_commands", cli=cli)

    def routes(self) -> tuple[Any, ...]:
        """The plugin's Litestar route handlers."""
        found = [routes for routes in self.call("dgpp_routes") if routes is not None]
        for routes in found:
            if not isinstance(routes, list | tuple):
                self.refuse("dgpp_routes", type(routes).__name__, "a list or tuple of route handlers")
        return tuple(route for routes in found for route in routes)

    def _place(self, hook: str) -> str:
        caller = getattr(self._manager.hook, hook, None)
        found = [source_of(i.function) for i in caller.get_hookimpls()] if caller else []
        return found[0] if found else self.plugin.file


_FUNCTIONS = ("read_config", "shorten", "rescale")
_DATA = [(field.name, field.type) for field in msgspec.structs.fields(ModelSpec) if field.name not in _FUNCTIONS]
_SpecData = msgspec.defstruct("_SpecData", _DATA)
"""The fields of `ModelSpec` that are data, for their types to be checked."""


def _kinds(value: object) -> str:
    kinds = sorted({type(item).__name__ for item in value}) if isinstance(value, list | tuple) else []
    return f"{type(value).__name__} of {', '.join(kinds)}" if kinds else type(value).__name__


class LoadedModel:
    """A model and its plugin's hooks.

    Every method may raise `PluginError` (the hook raised or returned the wrong thing), and what the hook raises of
    dgpp's own errors.

    Args:
        accepting: the names of the installed models that accept one of some ``architectures``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        hooks: PluginHooks,
        accepting: Callable[[Sequence[str]], Sequence[str]] = lambda architectures: (),
    ) -> None:
        self.spec, self.hooks, self._accepting = spec, hooks, accepting

    @property
    def plugin(self) -> Plugin:
        """The plugin that the model belongs to."""
        return self.hooks.plugin

    def read_config(self, raw: Mapping[str, Any], scaling: Mapping[str, Any] | None = None) -> ModelConfig:
        """A parsed config.json as the family's own struct; `ConfigError` names the field that is wrong.

        One whose ``architectures`` are those of other installed models is refused before the family's reader sees it;
        those that no installed model has are left to it.

        Args:
            scaling: ``rope_scaling`` of the deployment.
        """
        self._require_own(raw.get("architectures"))
        if scaling is not None:
            raw = self._rescaled(raw, scaling)
        read, name = self.spec.read_config, f"read_config of {self.spec.name}"
        place = source_of(read)
        config = self.hooks.run(lambda: read(raw), name, place)
        if not isinstance(config, ModelConfig):
            self.hooks.refuse(name, type(config).__name__, "ModelConfig or a subclass of it", place)
        core = {field: getattr(config, field) for field in ModelConfig.__struct_fields__}
        self.hooks.convert(core, ModelConfig, name, "ModelConfig", place)
        return config

    def _require_own(self, given: Any) -> None:
        shown = [name for name in given if isinstance(name, str)] if isinstance(given, list | tuple) else []
        own, others = self.spec.architectures, self._accepting(shown)
        if not others or set(shown) & set(own):
            return
        chosen = " or ".join(f"--plugin {name}" for name in others)
        raise ConfigError(
            f"config.json describes {' or '.join(others)}, not {self.spec.name}", where="architectures",
            found=", ".join(shown), expected=" or ".join(own),
            hint=f"{chosen}, or leave --plugin out" if len(others) == 1 else chosen,
        )  # fmt: skip

    def _rescaled(self, raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> Mapping[str, Any]:
        if (rescale := self.spec.rescale) is None:
            found, hint = f"the model {self.spec.name}", "take the key out of the deployment"
            raise ConfigError("`engine.rope_scaling` is not supported by this model", found=found, hint=hint)
        return self.hooks.run(lambda: rescale(raw, scaling), f"rescale of {self.spec.name}", source_of(rescale))

    def bindings(self, config: ModelConfig) -> BindingTable:
        """Every tensor the model expects of its checkpoint."""
        table = self.hooks.call("dgpp_bindings", spec=self.spec, config=config)
        return self.hooks.struct(table, BindingTable, "dgpp_bindings")

    def groups(
        self, config: ModelConfig, world: int = 1, settings: Mapping[str, Any] | None = None
    ) -> tuple[StateGroup, ...]:
        """State groups of the model and its drafter, as one rank of ``world`` keeps them.

        Args:
            settings: of the engine; by default nothing is set.

        Raises:
            PlanError: ``world`` ranks cannot divide them; names the numbers of ranks that can.
            ConfigError: the model has one form of its cache and another is set, or keeps nothing whose blocks ranks
                can divide.
        """
        settings = settings or {}
        plain = {name: value for name, value in settings.items() if name != "kv_dtype"}
        groups = self._shares(config, world, settings)
        if (kv_dtype := settings.get("kv_dtype", "bf16")) != "bf16" and groups == self._groups(config, world, plain):
            raise ConfigError(
                f"{self.spec.name} keeps its cache in one form",
                where="engine.kv_dtype",
                found=kv_dtype,
                expected="bf16",
            )
        require_divided(self.spec.name, groups, world, int(settings.get("decode_context_parallel", 1)))
        return groups

    def _shares(self, config: ModelConfig, world: int, settings: Mapping[str, Any]) -> tuple[StateGroup, ...]:
        try:
            return self._divided(config, world, settings)
        except ConfigError as error:
            if not error.where.startswith("world_size"):
                raise
            refused = error
        raise PlanError(
            refused.what, where=refused.where, found=refused.found, expected=self._worlds(config, settings),
            hint="choose such a world_size, or --world",
        )  # fmt: skip

    def _divided(self, config: ModelConfig, world: int, settings: Mapping[str, Any]) -> tuple[StateGroup, ...]:
        groups = self._groups(config, world, settings)
        if world > 1:
            require_shares(self._groups(config, 1, settings), groups, world)
        return groups

    def _worlds(self, config: ModelConfig, settings: Mapping[str, Any]) -> str:
        """The numbers of ranks that can divide state and tensors, found by trying each."""
        sizes = {binding.shape[binding.cut] for binding in self.bindings(config).tensors if binding.cut is not None}

        def would_do(world: int) -> bool:
            try:
                self._divided(config, world, settings)
            except DgppError:
                return False
            return not any(size % world for size in sizes)

        found = [str(world) for world in range(1, MOST_RANKS + 1) if would_do(world)]
        return f"a number of ranks that divides the model: {', '.join(found)}"

    def _groups(self, config: ModelConfig, world: int, settings: Mapping[str, Any]) -> tuple[StateGroup, ...]:
        found = self.hooks.call("dgpp_groups", spec=self.spec, config=config, world=world, settings=settings)
        groups: tuple[StateGroup, ...] = self.hooks.structs(found, StateGroup, "dgpp_groups", "state groups")
        return groups

    def build(self, config: ModelConfig, shard: Shard) -> Model:
        """The model of one rank, with its weights."""
        model: Model = self.hooks.call("dgpp_build", spec=self.spec, config=config, shard=shard)
        self._needs(model, ("forward", "logits"), "dgpp_build", "Model")
        return model

    def drafter(self, config: ModelConfig, shard: Shard, model: Model) -> Drafter | None:
        """The drafter that goes with ``model``, if there is one."""
        drafter: Drafter | None = self.hooks.call(
            "dgpp_drafter", spec=self.spec, config=config, shard=shard, model=model
        )
        if drafter is None:
            return None
        self._needs(drafter, ("observe", "propose"), "dgpp_drafter", "Drafter")
        if not isinstance(getattr(drafter, "depth", None), int):
            self.hooks.refuse("dgpp_drafter", "no integer `depth`", "dgpp_core.api.Drafter")
        return drafter

    def plan_terms(self, config: ModelConfig, world: int, settings: Mapping[str, Any]) -> tuple[PlanTerm, ...]:
        """Terms of the memory plan that the binding table and the state groups do not tell."""
        if not self.hooks.has("dgpp_memory_plan"):
            return ()
        found = self.hooks.call("dgpp_memory_plan", spec=self.spec, config=config, world=world, settings=settings)
        terms: tuple[PlanTerm, ...] = self.hooks.structs(found, PlanTerm, "dgpp_memory_plan", "PlanTerm")
        return terms

    def dialect(self) -> Dialect:
        """Chat template and markers; without the hook, the checkpoint's own template and no markers."""
        if not self.hooks.has("dgpp_dialect"):
            return Dialect()
        return self.hooks.struct(self.hooks.call("dgpp_dialect", spec=self.spec), Dialect, "dgpp_dialect")

    def vision(self, config: ModelConfig, processor: Mapping[str, Any]) -> Vision | None:
        """How the model takes images; None where it takes none. ``processor`` is a preprocessor_config.json."""
        if not self.hooks.has("dgpp_vision"):
            return None
        found = self.hooks.call("dgpp_vision", spec=self.spec, config=config, processor=processor)
        if found is not None and not isinstance(found, Vision):
            self.hooks.refuse("dgpp_vision", type(found).__name__, "Vision or None")
        return found

    def _needs(self, built: object, methods: tuple[str, ...], hook: str, protocol: str) -> None:
        if missing := [name for name in methods if not callable(getattr(built, name, None))]:
            found = f"{type(built).__name__} without the method {', '.join(missing)}"
            self.hooks.refuse(hook, found, f"dgpp_core.api.{protocol}, with the methods {', '.join(methods)}")
