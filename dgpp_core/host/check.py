"""What can be said of a plugin without a checkpoint: its hooks called on its own example configs, its imports."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from dgpp_core.api.bindings import BindingTable
from dgpp_core.api.errors import DgppError, PluginError
from dgpp_core.api.nearest import did_you_mean
from dgpp_core.api.spec import ModelConfig
from dgpp_core.host.loading import LoadedModel, Plugin, PluginHost

HEAVY = ("torch", "triton", "transformers", "litestar")


class Finding(msgspec.Struct, frozen=True):
    """One thing that was checked; ``details`` are the parts of an error."""

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str
    details: dict[str, str] = {}


def check_plugin(host: PluginHost, name: str, heavy_imports: Callable[[Plugin], Sequence[str]]) -> tuple[Finding, ...]:
    """Everything about the plugin ``name``: an entry point, a package or one of its models.

    Args:
        heavy_imports: which libraries importing a plugin imports; see `imported_libraries`.

    Raises:
        PluginError: no plugin is called that.
    """
    plugin = _find(host, name)
    found = [
        Finding("error", problem.plugin.name, problem.what, problem.error().parts())
        for problem in host.problems
        if problem.plugin.name == plugin.name or plugin.identity() in problem.found
    ]
    if plugin in host.plugins:
        found.append(Finding("ok", plugin.name, f"{plugin.identity()} keeps to the contract"))
        found.extend(_imports(plugin, heavy_imports(plugin)))
        for model_name, spec in host.models().items():
            model = host.model(model_name)
            if model.plugin == plugin:
                found.extend(_check_model(model))
                found.extend(_draft_depth(model, spec.draft_depth))
    return tuple(found)


def imported_libraries(plugin: Plugin) -> list[str]:
    """The libraries of `HEAVY` that importing the plugin imports, seen in a process of its own."""
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    module = plugin.entry_point.partition(":")[0]
    done = subprocess.run([sys.executable, "-c", code, module], capture_output=True, text=True, timeout=300)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise PluginError(f"`{module}` cannot be imported on its own", where=plugin.identity(), found="".join(last))
    return [name for name in HEAVY if name in done.stdout.split()]


def _find(host: PluginHost, name: str) -> Plugin:
    known = [*host.plugins, *(problem.plugin for problem in host.problems)]
    for plugin in known:
        if name in (plugin.name, plugin.distribution):
            return plugin
    if name in host.models():
        return host.model(name).plugin
    names = sorted({plugin.name for plugin in known})
    raise PluginError(
        f"there is no plugin {name!r}",
        found=name,
        expected="one of " + (", ".join(names) or "none: no plugin is there"),
        hint=did_you_mean(name, [*names, *host.models()]) or "`dgpp plugins list` shows them with packages and models",
    )


def _imports(plugin: Plugin, heavy: Sequence[str]) -> Iterator[Finding]:
    if not heavy:
        yield Finding("ok", plugin.name, "importing it imports nothing heavy")
        return
    names = ", ".join(heavy)
    text = f"importing it imports {names}, in every process and every command"
    details = {"hint": f"move the import of {names} into dgpp_build, or into a module that dgpp_build imports"}
    yield Finding("warning", plugin.name, text, details)


def _check_model(model: LoadedModel) -> Iterator[Finding]:
    for kind, raw in (("full_config", model.spec.full_config), ("tiny_config", model.spec.tiny_config)):
        subject = f"{model.spec.name}, {kind}"
        try:
            config = model.read_config(raw)
            table, groups = model.bindings(config), model.groups(config)
            model.plan_terms(config, 1, {})
            model.dialect()
        except DgppError as error:
            yield Finding("error", subject, error.what, error.parts())
            continue
        faults = [*_table_faults(table), *_twice("state group", [group.name for group in groups])]
        yield from (Finding("error", subject, fault) for fault in faults)
        if not faults:
            yield Finding("ok", subject, _summary(config, table, len(groups)))


def _summary(config: ModelConfig, table: BindingTable, groups: int) -> str:
    return f"{len(table.tensors)} tensors, {groups} state groups, {config.max_positions} positions"


def _draft_depth(model: LoadedModel, depth: int) -> Iterator[Finding]:
    if bool(depth) != model.hooks.has("dgpp_drafter") and depth:
        yield Finding("error", model.spec.name, f"draft_depth is {depth} and there is no hook dgpp_drafter")


def _table_faults(table: BindingTable) -> Iterator[str]:
    yield from _twice("tensor", [binding.name for binding in table.tensors])
    targets = {binding.target for binding in table.tensors}
    for binding in table.tensors:
        if not binding.shape or min(binding.shape) < 1:
            yield f"tensor {binding.name}: shape {binding.shape} has no elements"
        elif binding.cut is not None and not 0 <= binding.cut < len(binding.shape):
            yield f"tensor {binding.name}: cut {binding.cut} is no axis of shape {binding.shape}"
        elif binding.fused and (binding.cut != 0 or sum(binding.fused) != binding.shape[0]):
            yield f"tensor {binding.name}: fused parts {binding.fused} are not what axis 0 of {binding.shape} is cut in"
        elif binding.heads and (binding.cut is None or binding.shape[binding.cut] % binding.heads):
            yield f"tensor {binding.name}: {binding.heads} heads along a cut axis of {binding.shape}"
        elif binding.storage != "dense" and (binding.role != "linear" or len(binding.shape) != 2):
            yield f"tensor {binding.name}: stored as {binding.storage}, and no matrix of a linear layer"
        elif binding.grids != 1 and (not binding.storage.startswith("fp8_") or binding.shape[0] % binding.grids):
            yield f"tensor {binding.name}: {binding.grids} grids of {binding.storage} in {binding.shape[0]} rows"
    for _, second in table.shared:
        if second in targets:
            yield f"parameter {second} is shared with another and has tensors of its own"
    for first, _ in table.shared:
        if first not in targets:
            yield f"parameter {first} is shared and has no tensors"


def _twice(what: str, names: Iterable[str]) -> Iterator[str]:
    yield from (f"{what} {name} is there {count} times" for name, count in Counter(names).items() if count > 1)
