"""Discovery: which plugins are loaded, which are refused, and what is said of those."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api import ConfigError, PluginError
from dgpp_core.checkpoint.config_json import read_config
from dgpp_core.host.loading import PluginHost, Problem, load_plugins

Edit = Callable[[str, str], str]


def load(shelf: Any, setting: str = "") -> PluginHost:
    return load_plugins(environ={"DGPP_PLUGINS": setting}, entry_points=shelf.entry_points)


def only(host: PluginHost) -> Problem:
    assert len(host.problems) == 1, host.problems
    return host.problems[0]


def test_a_good_plugin_is_described_by_its_metadata(shelf: Any) -> None:
    file = shelf.add("alpha")
    host = load(shelf)
    (plugin,) = host.plugins
    assert (plugin.name, plugin.distribution, plugin.version) == ("alpha", "dist-alpha", "1.5")
    assert plugin.entry_point == "shelf_alpha"
    assert plugin.file == str(file)
    assert host.problems == ()
    assert host.models()["alpha"].repository == "test/alpha"


def test_installed_plugins_are_found_without_torch() -> None:
    code = (
        "import sys; from dgpp_core.host.loading import load_plugins; h = load_plugins(environ={});"
        "print(*h.models()); assert 'smollm2' in h.models(), h.problems; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("setting", "loaded"),
    [("", {"alpha", "beta"}), ("none", set()), ("beta", {"beta"}), (" beta , alpha,beta", {"alpha", "beta"})],
)
def test_dgpp_plugins_chooses(shelf: Any, setting: str, loaded: set[str]) -> None:
    shelf.add("alpha")
    shelf.add("beta")
    assert {plugin.name for plugin in load(shelf, setting).plugins} == loaded
    assert {name for name in ("alpha", "beta") if f"shelf_{name}" in sys.modules} == loaded


def test_dgpp_plugins_refuses_an_unknown_name(shelf: Any) -> None:
    shelf.add("alpha")
    with pytest.raises(PluginError) as caught:
        load(shelf, "alpah")
    assert caught.value.parts()["hint"] == "did you mean `alpha`?"
    assert caught.value.found == "alpah"


@pytest.mark.parametrize(
    ("source", "what", "found"),
    [
        ("import torch_that_is_not_there\n", "cannot be imported", "ModuleNotFoundError"),
        ("x = 1\nx = = 2\n", "cannot be imported", "SyntaxError"),
        ("def f():\n    return 1 / 0\nf()\n", "cannot be imported", "ZeroDivisionError"),
        ("import sys\nsys.exit('bye')\n", "cannot be imported", "SystemExit: bye"),
        ("from dgpp_core.api import hookimpl\n", "does not say which contract", "no DGPP_API"),
    ],
)
def test_a_broken_plugin_is_reported_and_the_others_go_on(shelf: Any, source: str, what: str, found: str) -> None:
    shelf.add("alpha")
    file = shelf.add("broken", source)
    host = load(shelf)
    assert list(host.models()) == ["alpha"]
    problem = only(host)
    assert (problem.plugin.distribution, problem.plugin.version) == ("dist-broken", "1.5")
    assert problem.plugin.entry_point == "shelf_broken"
    assert what in problem.what
    assert found in problem.found
    assert problem.place.startswith(str(file))
    assert problem.expected
    assert problem.hint


def test_the_line_of_an_import_error_is_the_line_that_failed(shelf: Any) -> None:
    file = shelf.add("broken", "def f():\n    return 1 / 0\nf()\n")
    assert only(load(shelf)).place == f"{file}:2"


def test_a_missing_dependency_is_to_be_installed(shelf: Any) -> None:
    shelf.add("broken", "import torch_that_is_not_there\n")
    assert only(load(shelf)).hint == "install `torch_that_is_not_there`"


@pytest.mark.parametrize(
    ("value", "hint"), [("no_such_module", "correct the entry point"), ("shelf_alpha:nothing", "must have `nothing`")]
)
def test_an_entry_point_that_leads_nowhere(shelf: Any, value: str, hint: str) -> None:
    shelf.add("alpha", value=value)
    assert hint in only(load(shelf)).hint


@pytest.mark.parametrize(
    ("declared", "hint"), [("2", "upgrade dgpp-core"), ("0", "upgrade dist-alpha"), ("'1'", "upgrade dist-alpha")]
)
def test_another_contract_version_is_refused(shelf: Any, edited: Edit, declared: str, hint: str) -> None:
    shelf.add("alpha", edited("DGPP_API = 1", f"DGPP_API = {declared}"))
    problem = only(load(shelf))
    assert problem.found == f"DGPP_API = {declared}"
    assert problem.expected == "DGPP_API = 1"
    assert problem.hint == hint


def test_two_plugins_with_one_model_lose_it_and_keep_the_rest(shelf: Any, edited: Edit) -> None:
    both = edited('(spec("MODEL"),)', '(spec("shared"), spec("own"))')
    shelf.add("alpha", both.replace('"own"', '"alpha-own"'))
    shelf.add("beta", both.replace('"own"', '"beta-own"'))
    host = load(shelf)
    assert list(host.models()) == ["alpha-own", "beta-own"]
    problem = only(host)
    assert "dist-alpha 1.5" in problem.found
    assert "dist-beta 1.5" in problem.found
    with pytest.raises(PluginError, match="several plugins define the model 'shared'"):
        host.model("shared")
    assert list(load(shelf, "beta").models()) == ["beta-own", "shared"]


def test_two_packages_with_one_plugin_name_are_both_refused(shelf: Any) -> None:
    shelf.add("alpha", dist="first")
    shelf.add("alpha", dist="second")
    shelf.add("beta")
    host = load(shelf)
    assert list(host.models()) == ["beta"]
    assert "first 1.5 (entry point alpha = shelf_first)" in only(host).found
    assert "second 1.5 (entry point alpha = shelf_second)" in only(host).found
    assert "shelf_first" not in sys.modules


def test_an_unknown_model_lists_the_known_the_near_and_the_broken(shelf: Any) -> None:
    shelf.add("alpha")
    shelf.add("broken", "import torch_that_is_not_there\n")
    with pytest.raises(PluginError) as caught:
        load(shelf).model("alpa")
    assert caught.value.expected == "one of alpha"
    assert "did you mean `alpha`?" in caught.value.hint
    assert "dist-broken 1.5 (entry point broken = shelf_broken): the plugin cannot be imported" in caught.value.hint


@pytest.mark.parametrize("name", ["alpha", "dist-alpha"])
def test_a_plugins_name_where_a_models_is_wanted_gets_its_models(shelf: Any, edited: Edit, name: str) -> None:
    shelf.add("alpha", edited('(spec("MODEL"),)', '(spec("alpha-big"), spec("alpha-small"))'))
    shelf.add("beta")
    with pytest.raises(PluginError) as caught:
        load(shelf).model(name)
    assert caught.value.hint == f"`{name}` is a plugin: name a model of it, alpha-big or alpha-small"


def test_a_name_that_is_nothings_gets_no_package_that_may_be_installed(shelf: Any) -> None:
    shelf.add("alpha")
    with pytest.raises(PluginError) as caught:
        load(shelf).model("quite-another")
    assert caught.value.hint == "install the package that has it (`dgpp plugins list` shows those here)"


def refusal(host: PluginHost, model: str, architectures: object) -> dict[str, str]:
    """What is said of a config.json with these ``architectures``; empty where the model's reader takes it."""
    try:
        host.model(model).read_config({"vocab_size": 16, "architectures": architectures})
    except ConfigError as error:
        return error.parts()
    return {}


def test_a_config_of_another_installed_model_is_refused_by_name_before_it_is_read(shelf: Any, edited: Edit) -> None:
    shelf.add(
        "alpha", edited('vocab_size=raw["vocab_size"]', 'vocab_size=raw["key of alpha"]').replace("MODEL", "alpha")
    )
    shelf.add("beta")
    host = load(shelf)
    assert refusal(host, "alpha", ["BetaForCausalLM"]) == {
        "what": "config.json describes beta, not alpha",
        "where": "architectures",
        "found": "BetaForCausalLM",
        "expected": "AlphaForCausalLM",
        "hint": "--plugin beta, or leave --plugin out",
    }
    with pytest.raises(PluginError, match="read_config of alpha"):
        host.model("alpha").read_config({"architectures": ["AlphaForCausalLM"]})


@pytest.mark.parametrize(
    "architectures",
    [
        None,
        [],
        "BetaForCausalLM",
        [3, ["BetaForCausalLM"]],
        ["GammaForCausalLM"],
        ["BetaForCausalLM", "AlphaForCausalLM"],
    ],
)
def test_architectures_of_the_model_or_of_none_are_left_to_its_reader(shelf: Any, architectures: object) -> None:
    shelf.add("alpha")
    shelf.add("beta")
    assert refusal(load(shelf), "alpha", architectures) == {}


def test_a_config_that_several_others_accept_names_each(shelf: Any, edited: Edit) -> None:
    shared = edited('architectures=(name.title() + "ForCausalLM",)', 'architectures=("SharedForCausalLM",)')
    shelf.add("alpha")
    shelf.add("beta", shared.replace("MODEL", "beta"))
    shelf.add("gamma", shared.replace("MODEL", "gamma"))
    host = load(shelf)
    assert refusal(host, "alpha", ["SharedForCausalLM"])["hint"] == "--plugin beta or --plugin gamma"
    assert refusal(host, "beta", ["SharedForCausalLM"]) == {}


def test_every_installed_model_refuses_the_checkpoints_of_every_other(tmp_path: Path) -> None:
    host = load_plugins(environ={})
    for name, spec in host.models().items():
        (tmp_path / "config.json").write_text(json.dumps(spec.tiny_config))
        for other in host.models():
            if other != name:
                model = host.model(other)
                with pytest.raises(ConfigError) as caught:
                    read_config(tmp_path, model.read_config, model.spec.full_config)
                assert caught.value.what == f"config.json describes {name}, not {other}"
                assert caught.value.where == f"{tmp_path / 'config.json'}, architectures"
                assert caught.value.hint == f"--plugin {name}, or leave --plugin out"


def test_a_model_is_found_by_architecture_and_by_repository(shelf: Any) -> None:
    shelf.add("alpha")
    shelf.add("beta")
    host = load(shelf)
    assert host.find_architecture(["Other", "BetaForCausalLM"]).spec.name == "beta"
    found = host.find_repository("test/alpha")
    assert found is not None
    assert found.spec.name == "alpha"
    assert host.find_repository("test/gamma") is None
    with pytest.raises(PluginError, match="no installed plugin accepts the architecture GammaForCausalLM"):
        host.find_architecture(["GammaForCausalLM"])
    with pytest.raises(PluginError) as caught:
        host.find_architecture(["AlphaForCausalLM", "BetaForCausalLM"])
    assert caught.value.found == "alpha, beta"


RELEASES = 'quantised={"q8": {"bits": 8}}, releases={"else/alpha-q8": "q8"}, repository="test/"'


def test_a_release_is_found_by_its_repository_and_its_config_is_known(shelf: Any, edited: Edit) -> None:
    shelf.add("alpha", edited('repository="test/"', RELEASES).replace("MODEL", "alpha"))
    found = load(shelf).find_repository("else/alpha-q8")
    assert found is not None
    assert found.spec.config_of("else/alpha-q8") == {"vocab_size": 16, "quantization_config": {"bits": 8}}
    assert found.spec.config_of("test/alpha") == {"vocab_size": 16}
    assert found.spec.config_of("else/alpha") is None


def test_a_release_in_a_format_that_the_model_lacks_is_refused(shelf: Any, edited: Edit) -> None:
    shelf.add("alpha", edited('repository="test/"', RELEASES.replace('"q8"}', '"q4"}')).replace("MODEL", "alpha"))
    assert "releases in q4" in only(load(shelf)).found
