"""``check_plugin``: every fault of a plugin that can be seen without a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dgpp_core.api import PluginError
from dgpp_core.host.check import Finding, check_plugin, imported_libraries
from dgpp_core.host.loading import Plugin, load_plugins

Edit = Callable[[str, str], str]
EMBED = 'Binding(name="embed", shape=(config.vocab_size, 8), target="embed", role="embedding")'


def check(shelf: Any, source: str = "", heavy: tuple[str, ...] = ()) -> tuple[Finding, ...]:
    shelf.add("alpha", source.replace("MODEL", "alpha"))
    return check_plugin(
        load_plugins(environ={}, entry_points=shelf.entry_points), "alpha", heavy_imports=lambda plugin: heavy
    )


def errors(findings: tuple[Finding, ...]) -> set[str]:
    return {finding.text for finding in findings if finding.level == "error"}


def test_a_sound_plugin(shelf: Any) -> None:
    findings = check(shelf)
    assert {finding.level for finding in findings} == {"ok"}
    assert "1 tensors, 1 state groups, 64 positions" in {finding.text for finding in findings}


def test_a_heavy_import_is_a_warning(shelf: Any) -> None:
    (finding,) = [finding for finding in check(shelf, heavy=("torch",)) if finding.level != "ok"]
    assert finding.level == "warning"
    assert "imports torch" in finding.text


@pytest.mark.slow
@pytest.mark.parametrize(("line", "found"), [("", []), ("import torch", ["torch"])])
def test_imports_are_seen_in_a_process_of_their_own(
    shelf: Any, monkeypatch: pytest.MonkeyPatch, line: str, found: list[str]
) -> None:
    shelf.add("alpha", f"{line}\n")
    monkeypatch.setenv("PYTHONPATH", str(shelf.folder))
    plugin = Plugin(name="alpha", distribution="", version="", entry_point="shelf_alpha")
    assert [name for name in imported_libraries(plugin) if name == "torch"] == found


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        (EMBED + ",", EMBED + "," + EMBED, "tensor embed is there 2 times"),
        (EMBED, EMBED.replace("8)", "0)"), "tensor embed: shape (16, 0) has no elements"),
        (EMBED, EMBED.replace("role=", "cut=2, role="), "tensor embed: cut 2 is no axis of shape (16, 8)"),
        (EMBED, EMBED.replace("role=", "storage='nvfp4', role="), "tensor embed: stored as nvfp4, and no matrix"),
        (EMBED + ",)", EMBED + ",), shared=(('embed', 'embed'),)", "parameter embed is shared with another"),
        (EMBED + ",)", EMBED + ",), shared=(('none', 'head'),)", "parameter none is shared and has no tensors"),
        ("width=8)]", "width=8)] * 2", "state group k is there 2 times"),
        ("tiny_config=config,", "tiny_config={},", "`read_config of alpha` raised KeyError"),
        ("tiny_config=config,", "tiny_config=config, draft_depth=1,", "draft_depth is 1"),
    ],
)
def test_faults(shelf: Any, edited: Edit, old: str, new: str, fault: str) -> None:
    assert any(text.startswith(fault) for text in errors(check(shelf, edited(old, new))))


def test_a_plugin_that_does_not_load_shows_its_problems(shelf: Any, edited: Edit) -> None:
    assert errors(check(shelf, edited("DGPP_API = 1", "DGPP_API = 7"))) == {
        "the plugin was written for another contract"
    }


def test_a_model_lost_to_a_clash_is_an_error_of_both(shelf: Any) -> None:
    shelf.add("alpha", model="same")
    shelf.add("beta", model="same")
    host = load_plugins(environ={}, entry_points=shelf.entry_points)
    for name in ("alpha", "beta"):
        assert errors(check_plugin(host, name, lambda plugin: ())) == {
            "several plugins define the model 'same'; it is not available"
        }


def test_an_unknown_name_lists_the_known(shelf: Any) -> None:
    shelf.add("alpha")
    host = load_plugins(environ={}, entry_points=shelf.entry_points)
    with pytest.raises(PluginError) as caught:
        check_plugin(host, "gamma", lambda plugin: ())
    assert caught.value.expected == "one of alpha"
