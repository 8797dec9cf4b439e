"""The contract's rules, each broken once: the report names the function, its line, and what it should have been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dgpp_core.host.loading import Problem, load_plugins

Edit = Callable[[str, str], str]


def problems(shelf: Any, source: str) -> tuple[Problem, ...]:
    shelf.add("alpha", source)
    return load_plugins(environ={}, entry_points=shelf.entry_points).problems


def line_of(shelf: Any, text: str) -> str:
    """``file:line`` of the decorated function whose definition starts with ``text``."""
    file = shelf.folder / "shelf_alpha.py"
    lines = file.read_text().splitlines()
    return f"{file}:{next(i for i, line in enumerate(lines, 1) if line.startswith(text)) - 1}"


def test_a_misspelt_hook_and_the_one_it_should_have_been(shelf: Any, edited: Edit) -> None:
    found = problems(shelf, edited("def dgpp_models", "def dgpp_model"))
    assert [p.what for p in found] == ["`dgpp_model` is not a hook", "the required hook `dgpp_models` is missing"]
    assert found[0].hint == "did you mean `dgpp_models`?"
    assert found[0].place == line_of(shelf, "def dgpp_model")
    assert "dgpp_build" in found[0].expected
    assert found[1].hint == "define dgpp_models()"


@pytest.mark.parametrize("hook", ["dgpp_models", "dgpp_bindings", "dgpp_groups", "dgpp_build"])
def test_a_hook_without_its_mark(shelf: Any, edited: Edit, hook: str) -> None:
    (problem,) = problems(shelf, edited(f"@hookimpl\ndef {hook}", f"\ndef {hook}"))
    assert problem.what == f"`{hook}` is not marked as a hook"
    assert problem.hint == f"put @hookimpl above `{hook}`"


@pytest.mark.parametrize(
    ("signature", "argument", "hint"),
    [
        ("spec, konfig", "konfig", "did you mean `config`?"),
        ("spec, config, world", "world", ""),
        ("spec, config=None", "config", "did you mean `config`?"),
        ("spec, *, config", "config", "did you mean `config`?"),
        ("*args", "args", ""),
    ],
)
def test_arguments_that_a_call_cannot_fill(shelf: Any, edited: Edit, signature: str, argument: str, hint: str) -> None:
    (problem,) = problems(shelf, edited("dgpp_bindings(spec, config)", f"dgpp_bindings({signature})"))
    assert problem.what == f"the hook `dgpp_bindings` takes an argument `{argument}` that it cannot be given"
    assert problem.found == f"dgpp_bindings({signature})"
    assert "positional arguments spec, config, without defaults" in problem.expected
    assert problem.hint == hint
    assert problem.place == line_of(shelf, "def dgpp_bindings")


def test_an_argument_of_the_plugins_own_may_have_a_default(shelf: Any, edited: Edit) -> None:
    assert problems(shelf, edited("dgpp_bindings(spec, config)", "dgpp_bindings(spec, config, extra=1)")) == ()


def test_a_class_is_no_plugin_and_its_instance_is(shelf: Any) -> None:
    source = """
from dgpp_core.api import hookimpl
class Plugin:
    DGPP_API = 1
    @hookimpl
    def dgpp_models(self): return ()
    @hookimpl
    def dgpp_bindings(self, spec): ...
    @hookimpl
    def dgpp_groups(self, spec): ...
    @hookimpl
    def dgpp_build(self, spec): ...
plugin = Plugin()
"""
    file = shelf.add("alpha", source, value="shelf_alpha:Plugin")
    shelf.add("beta", source, value="shelf_beta:plugin")
    host = load_plugins(environ={}, entry_points=shelf.entry_points)
    (problem,) = host.problems
    assert problem.what == "the entry point names a class"
    assert problem.place == f"{file}:3"
    assert [plugin.name for plugin in host.plugins] == ["beta"]
    assert host.plugins[0].file.endswith("shelf_beta.py")


def test_every_fault_of_a_plugin_is_reported_at_once(shelf: Any) -> None:
    found = problems(shelf, "DGPP_API = 1\n")
    assert len(found) == 4
    assert all("is missing" in problem.what for problem in found)
