"""Who a plugin is, and what is wrong with it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec

from dgpp_core.api.errors import PluginError


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """A plugin as its installed metadata describes it.

    Attributes:
        name: of the entry point.
        distribution: the package that carries it, as pip names it; empty where the entry point has none.
        version: of the distribution.
        entry_point: the entry point's value, ``module`` or ``module:object``.
        file: source file of the module; empty until it is imported.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    file: str = ""

    def identity(self) -> str:
        """``dgpp-glm 1.2 (entry point glm = dgpp_glm)``."""
        package = f"{self.distribution} {self.version}".strip() or "a plugin without package metadata"
        return f"{package} (entry point {self.name} = {self.entry_point})"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something about a plugin that keeps it, or some of its models, from being used.

    Attributes:
        plugin: whose problem it is.
        what: one sentence without a full stop.
        place: ``file:line``, or the best that is known of it.
        found: what was there.
        expected: what should have been there.
        hint: what to do.
        models: the model names that the problem makes unavailable, where they are known.
    """

    plugin: Plugin
    what: str
    place: str = ""
    found: str = ""
    expected: str = ""
    hint: str = ""
    models: tuple[str, ...] = ()

    def error(self) -> BrokenPluginError:
        """The same as an exception."""
        return BrokenPluginError(self)


class BrokenPluginError(PluginError):
    """A `Problem` that was met while a plugin was in use."""

    def __init__(self, problem: Problem) -> None:
        p = self.problem = problem
        where = ", ".join(part for part in (p.plugin.identity(), p.place) if part)
        super().__init__(p.what, where=where, found=p.found, expected=p.expected, hint=p.hint)


def source_of(thing: object) -> str:
    """``file:line`` of a function or a class, the file of a module, or an empty string."""
    if isinstance(thing, ModuleType):
        return thing.__file__ or ""
    try:
        plain = inspect.unwrap(thing)  # type: ignore[arg-type]
        return f"{inspect.getsourcefile(plain)}:{inspect.getsourcelines(plain)[1]}"
    except (TypeError, OSError):
        return ""


def raised_at(error: BaseException, package: str = "") -> str:
    """``file:line`` where ``error`` arose: the innermost frame in the folder ``package``, else the innermost of all."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [f"{name}:{line}" for name, line in _frames(error)]
    inside = [frame for frame in frames if package and Path(frame).is_relative_to(package)]
    return (inside or frames or [""])[-1]


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        if not name.startswith("<frozen importlib") and "/importlib/" not in name:
            yield name, line
