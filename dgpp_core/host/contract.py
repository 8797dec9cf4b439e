"""Whether an imported plugin keeps to the contract: its version, its hooks and their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence

import pluggy

from dgpp_core.api.hooks import API_VERSION, PROJECT, Hooks
from dgpp_core.api.nearest import did_you_mean
from dgpp_core.host.problems import Plugin, Problem, source_of

REQUIRED_HOOKS = ("dgpp_models", "dgpp_bindings", "dgpp_groups", "dgpp_build")


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the hooks. Each plugin gets its own, so that a model's hooks are its plugin's."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    return manager


def breaches(plugin: Plugin, module: object) -> tuple[Problem, ...]:
    """Every way in which ``module`` parts from the contract; it may be registered when there are none."""
    if inspect.isclass(module):
        return (
            Problem(
                plugin=plugin, what="the entry point names a class", place=source_of(module), found=module.__name__,
                expected="a module or an instance", hint="let the entry point name the module or an instance",
            ),
        )  # fmt: skip
    if version := _version(plugin, module):
        return (version,)
    return tuple(_hooks(plugin, module))


def _version(plugin: Plugin, module: object) -> Problem | None:
    found = getattr(module, "DGPP_API", None)
    if found == API_VERSION:
        return None
    if found is None:
        what, hint = (
            "the plugin does not say which contract it was written for",
            f"add `DGPP_API = {API_VERSION}` to it",
        )
    else:
        what, newer = "the plugin was written for another contract", isinstance(found, int) and found > API_VERSION
        hint = "upgrade dgpp-core" if newer else f"upgrade {plugin.distribution or 'the plugin'}"
    return Problem(
        plugin=plugin, what=what, place=plugin.file, hint=hint, expected=f"DGPP_API = {API_VERSION}",
        found="no DGPP_API" if found is None else f"DGPP_API = {found!r}",
    )  # fmt: skip


def _hooks(plugin: Plugin, module: object) -> Iterator[Problem]:
    manager = new_manager()
    specs = {name: _names(getattr(Hooks, name))[1:] for name in dir(Hooks) if name.startswith("dgpp_")}
    marked = {name for name in dir(module) if manager.parse_hookimpl_opts(module, name) is not None}
    for name in sorted(marked):
        function = getattr(module, name)
        if name not in specs:
            yield Problem(
                plugin=plugin, what=f"`{name}` is not a hook", place=source_of(function), found=name,
                expected="one of " + ", ".join(specs), hint=did_you_mean(name, specs),
            )  # fmt: skip
        elif wrong := _unfillable(function, specs[name]):
            yield Problem(
                plugin=plugin, what=f"the hook `{name}` takes an argument `{wrong[0]}` that it cannot be given",
                place=source_of(function), found=f"{name}{inspect.signature(function)}",
                expected=f"some of the positional arguments {_list(specs[name])}, without defaults",
                hint=did_you_mean(wrong[0], specs[name]),
            )  # fmt: skip
    for name in specs:
        if name not in marked and callable(unmarked := getattr(module, name, None)):
            yield Problem(
                plugin=plugin, what=f"`{name}` is not marked as a hook", place=source_of(unmarked),
                found="a plain function", expected="a function with @hookimpl", hint=f"put @hookimpl above `{name}`",
            )  # fmt: skip
        elif name not in marked and name in REQUIRED_HOOKS:
            yield Problem(
                plugin=plugin, what=f"the required hook `{name}` is missing", place=plugin.file,
                found="the hooks " + _list(sorted(marked)), expected=f"a function `{name}` with @hookimpl",
                hint=f"define {name}({', '.join(specs[name])})",
            )  # fmt: skip


def _names(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _unfillable(function: Callable[..., object], given: Sequence[str]) -> list[str]:
    """Parameters that a call cannot fill: pluggy passes, by position, those that have no default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in positional or (p.name in given) != (p.default is p.empty)]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
