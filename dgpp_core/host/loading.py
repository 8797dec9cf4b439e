"""Finding and loading plugins. Every process loads them through `load_plugins`."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import MappingProxyType, ModuleType

import msgspec

from dgpp_core.api.errors import DgppError, PluginError
from dgpp_core.api.hooks import ENTRY_POINT_GROUP
from dgpp_core.api.nearest import did_you_mean
from dgpp_core.api.spec import ModelSpec
from dgpp_core.host.contract import breaches, new_manager
from dgpp_core.host.loaded import LoadedModel, PluginHooks
from dgpp_core.host.problems import BrokenPluginError, Plugin, Problem, raised_at

__all__ = ["LoadedModel", "Plugin", "PluginHost", "Problem", "installed", "load_plugins"]

logger = logging.getLogger("dgpp.plugins")


def installed() -> Iterable[EntryPoint]:
    """The entry points of every installed distribution."""
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


class PluginHost:
    """The plugins of this process, their models, and what is wrong with the others.

    Args:
        hooks: of each plugin that keeps to the contract, by entry point name.
        problems: of those that do not; the host adds the models that two plugins both define.
    """

    def __init__(self, hooks: Sequence[tuple[PluginHooks, tuple[ModelSpec, ...]]], problems: Iterable[Problem]) -> None:
        defined: dict[str, list[LoadedModel]] = defaultdict(list)
        for own, specs in hooks:
            for spec in specs:
                defined[spec.name].append(LoadedModel(spec, own, self._accepting))
        self._models = {name: models[0] for name, models in sorted(defined.items()) if len(models) == 1}
        self._hooks = [own for own, _ in hooks]
        self.plugins = tuple(own.plugin for own, _ in hooks)
        clashes = [_clash(name, models) for name, models in defined.items() if len(models) > 1]
        self.problems = (*problems, *clashes)

    def models(self) -> Mapping[str, ModelSpec]:
        """Every model that can be built, by name."""
        return MappingProxyType({name: model.spec for name, model in self._models.items()})

    def model(self, name: str) -> LoadedModel:
        """The model ``name``.

        Raises:
            PluginError: there is none; lists the known names and the problems that may be the reason.
        """
        if name in self._models:
            return self._models[name]
        raise self._unknown(f"no installed plugin has a model named {name!r}", name)

    def find_architecture(self, architectures: Sequence[str]) -> LoadedModel:
        """The one model that accepts one of ``architectures`` (the field of that name in config.json).

        Raises:
            PluginError: none does, or several do.
        """
        found = self._accepting(architectures)
        if len(found) == 1:
            return self._models[found[0]]
        shown = ", ".join(architectures) or "none given"
        if not found:
            raise self._unknown(f"no installed plugin accepts the architecture {shown}", shown)
        raise PluginError(
            f"several models accept the architecture {shown}", found=", ".join(found), expected="one",
            hint="name it with --plugin",
        )  # fmt: skip

    def find_repository(self, repository: str) -> LoadedModel | None:
        """The one model that has ``repository`` as its default or as a release."""
        found = [m for m in self._models.values() if m.spec.config_of(repository) is not None]
        return found[0] if len(found) == 1 else None

    def hooks(self, hook: str) -> tuple[PluginHooks, ...]:
        """The plugins that implement the optional ``hook``, for example ``dgpp_routes``."""
        return tuple(own for own in self._hooks if own.has(hook))

    def _accepting(self, architectures: Sequence[str]) -> Sequence[str]:
        """The names of the models that accept one of ``architectures``."""
        return [name for name, m in self._models.items() if set(m.spec.architectures) & set(architectures)]

    def _models_of(self, name: str) -> str:
        """A hint for the name of a plugin, or of its package, where a model's is wanted; empty for any other name."""
        plugin = next((plugin for plugin in self.plugins if name in (plugin.name, plugin.distribution)), None)
        if plugin is None:
            return ""
        names = [model.spec.name for model in self._models.values() if model.plugin == plugin]
        return f"`{name}` is a plugin: name a model of it, {' or '.join(names) or 'of which it has none'}"

    def _unknown(self, what: str, name: str) -> PluginError:
        blame = [problem for problem in self.problems if name in problem.models or not problem.models]
        reasons = "; ".join(f"{p.plugin.identity()}: {p.what}" for p in blame)
        hints = (
            self._models_of(name) or did_you_mean(name, self._models),
            f"unusable: {reasons} (see `dgpp plugins list`)" if reasons else "",
        )
        known = ", ".join(self._models)
        advice = (
            "; ".join(filter(None, hints)) or "install the package that has it (`dgpp plugins list` shows those here)"
        )
        expected = f"one of {known}" if known else "a model; none is available"
        return PluginError(what, found=name, expected=expected, hint=advice)


def load_plugins(
    *, environ: Mapping[str, str], entry_points: Callable[[], Iterable[EntryPoint]] = installed
) -> PluginHost:
    """Import every installed plugin, or those that ``DGPP_PLUGINS`` names.

    Args:
        environ: read for ``DGPP_PLUGINS``: entry point names with commas between, or ``none``.
        entry_points: where plugins are found.

    Raises:
        PluginError: ``DGPP_PLUGINS`` names an entry point that is not there.
    """
    by_name: dict[str, list[EntryPoint]] = defaultdict(list)
    for point in sorted(entry_points(), key=lambda p: (p.name, p.value)):
        by_name[point.name].append(point)
    hooks: list[tuple[PluginHooks, tuple[ModelSpec, ...]]] = []
    problems: list[Problem] = []
    for name in _wanted(environ.get("DGPP_PLUGINS", ""), by_name):
        points = by_name[name]
        result = _load(points[0]) if len(points) == 1 else (_same_name(points),)
        if isinstance(result[0], PluginHooks):
            hooks.append(result)
        else:
            problems.extend(result)
    return PluginHost(hooks, problems)


def _wanted(setting: str, names: Mapping[str, object]) -> Sequence[str]:
    wanted = [name.strip() for name in setting.split(",") if name.strip()]
    if wanted == ["none"]:
        return ()
    for name in wanted:
        if name not in names:
            raise PluginError(
                f"DGPP_PLUGINS names a plugin that is not installed: {name!r}", where="the environment", found=setting,
                expected="none, or some of " + (", ".join(names) or "(no plugin is installed)"),
                hint=did_you_mean(name, names) or "install it, or take it out of DGPP_PLUGINS",
            )  # fmt: skip
    return list(dict.fromkeys(wanted)) or list(names)


def _load(point: EntryPoint) -> tuple[PluginHooks, tuple[ModelSpec, ...]] | tuple[Problem, ...]:
    plugin = describe(point)
    try:
        module = point.load()
    except (Exception, SystemExit) as error:
        return (_not_imported(plugin, error),)
    plugin = msgspec.structs.replace(plugin, file=_file(module))
    if problems := breaches(plugin, module):
        return problems
    manager = new_manager()
    manager.register(module)
    hooks = PluginHooks(plugin, manager)
    try:
        return hooks, hooks.models()
    except BrokenPluginError as error:
        return (error.problem,)
    except DgppError as error:
        return (
            Problem(
                plugin=plugin, what=error.what, place=error.where, found=error.found, expected=error.expected,
                hint=error.hint,
            ),
        )  # fmt: skip


def describe(point: EntryPoint) -> Plugin:
    """What the installed metadata tells of a plugin, without importing it."""
    name, version = (point.dist.metadata["Name"], point.dist.version) if point.dist else ("", "")
    return Plugin(name=point.name, distribution=name, version=version, entry_point=point.value)


def _file(module: object) -> str:
    home = module if isinstance(module, ModuleType) else sys.modules.get(type(module).__module__)
    return getattr(home, "__file__", None) or ""


def _not_imported(plugin: Plugin, error: BaseException) -> Problem:
    module, _, attribute = plugin.entry_point.partition(":")
    found = f"{type(error).__name__}: {error}"
    hint = "install the plugin's newest version, or uninstall it"
    if isinstance(error, ModuleNotFoundError) and error.name:
        absent = module == error.name or module.startswith(error.name + ".")
        hint = "correct the entry point, or reinstall the package" if absent else f"install `{error.name}`"
    elif isinstance(error, AttributeError) and attribute:
        hint = f"correct the entry point: `{module}` must have `{attribute}`"
    return Problem(
        plugin=plugin, what="the plugin cannot be imported", place=raised_at(error), found=found,
        expected=f"`{plugin.entry_point}` to be importable", hint=hint,
    )  # fmt: skip


def _same_name(points: Sequence[EntryPoint]) -> Problem:
    found = " and ".join(describe(point).identity() for point in points)
    return Problem(
        plugin=describe(points[0]), what=f"several packages have a plugin named {points[0].name!r}; none is loaded",
        found=found, expected="one", hint="uninstall all but one of them",
    )  # fmt: skip


def _clash(name: str, models: Sequence[LoadedModel]) -> Problem:
    found = " and ".join(model.plugin.identity() for model in models)
    others = " or ".join(model.plugin.name for model in models)
    return Problem(
        plugin=models[0].plugin, what=f"several plugins define the model {name!r}; it is not available", found=found,
        expected="one", hint=f"uninstall all but one, or choose one with DGPP_PLUGINS={others}", models=(name,),
    )  # fmt: skip
