"""A model's hooks: what they return is checked, and whatever goes wrong names the plugin, the hook and the line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api import (
    Binding,
    BindingTable,
    ConfigError,
    Dialect,
    ModelConfig,
    PagedGroup,
    PlanTerm,
    PluginError,
)
from dgpp_core.host.loading import LoadedModel, PluginHost, load_plugins

Edit = Callable[[str, str], str]
CONFIG = ModelConfig(vocab_size=16, max_positions=64, hidden_size=8)


def host_of(shelf: Any, source: str = "") -> PluginHost:
    shelf.add("alpha", source.replace("MODEL", "alpha"))
    return load_plugins(environ={}, entry_points=shelf.entry_points)


def model_of(shelf: Any, source: str = "") -> LoadedModel:
    return host_of(shelf, source).model("alpha")


def test_a_good_model_answers_every_question(shelf: Any) -> None:
    model = model_of(shelf)
    config = model.read_config({"vocab_size": 16})
    assert config == CONFIG
    assert model.bindings(config) == BindingTable(
        (Binding(name="embed", shape=(16, 8), target="embed", role="embedding"),)
    )
    assert model.groups(config) == (PagedGroup(name="k", layers=1, heads=1, width=8),)
    assert hasattr(model.build(config, shard=None), "logits")  # type: ignore[arg-type]
    assert model.plugin.distribution == "dist-alpha"


def test_optional_hooks_that_are_absent_have_plain_answers(shelf: Any) -> None:
    model = model_of(shelf)
    assert model.dialect() == Dialect()
    assert model.plan_terms(CONFIG, 1, {}) == ()
    assert model.drafter(CONFIG, None, None) is None  # type: ignore[arg-type]
    assert model.hooks.has("dgpp_routes") is False


def test_optional_hooks_that_are_there_are_used(shelf: Any, edited: Edit) -> None:
    source = edited(
        "class Built:",
        """
from dgpp_core.api import Dialect, PlanTerm
@hookimpl
def dgpp_dialect(spec): return Dialect(reasoning=("<a>", "</a>"))
@hookimpl
def dgpp_memory_plan(world, settings): return [PlanTerm("scratch", 10 * world, str(settings["x"]))]
@hookimpl
def dgpp_drafter(model): return model
@hookimpl
def dgpp_routes(): return ["a route"]
class Built:""",
    )
    model = model_of(shelf, source)
    built = model.build(CONFIG, None)  # type: ignore[arg-type]
    assert model.dialect().reasoning == ("<a>", "</a>")
    assert model.plan_terms(CONFIG, 2, {"x": 1}) == (PlanTerm("scratch", 20, "1"),)
    assert model.drafter(CONFIG, None, built) is built  # type: ignore[arg-type, comparison-overlap]
    assert model.hooks.routes() == ("a route",)


def test_a_raising_hook_names_plugin_hook_and_line(shelf: Any, edited: Edit) -> None:
    model = model_of(shelf, edited("return Built()", "return helper()\n\n\ndef helper():\n    return {}['gone']"))
    with pytest.raises(PluginError) as caught:
        model.build(CONFIG, None)  # type: ignore[arg-type]
    text = str(caught.value)
    line = (Path(model.plugin.file).read_text().splitlines()).index("    return {}['gone']") + 1
    assert caught.value.what == "`dgpp_build` raised KeyError"
    assert f"dist-alpha 1.5 (entry point alpha = shelf_alpha), {model.plugin.file}:{line}" in text
    assert "found: 'gone'" in text
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_line_is_the_plugins_own_where_a_library_raised(shelf: Any, edited: Edit) -> None:
    model = model_of(shelf, edited("return Built()", "import json; return json.loads('{')"))
    with pytest.raises(PluginError) as caught:
        model.build(CONFIG, None)  # type: ignore[arg-type]
    assert f"{model.plugin.file}:" in caught.value.where


def test_errors_of_our_own_pass_through(shelf: Any, edited: Edit) -> None:
    source = edited(
        "def read_config(raw):\n", "def read_config(raw):\n    raise ConfigError('no', where='vocab_size')\n"
    )
    model = model_of(shelf, source.replace("import BindingTable", "import ConfigError, BindingTable"))
    with pytest.raises(ConfigError) as caught:
        model.read_config({})
    assert caught.value.where == "vocab_size"


TABLE = 'return BindingTable((Binding(name="embed", shape=(config.vocab_size, 8), target="embed", role="embedding"),))'
GROUPS = 'return [PagedGroup(name="k", layers=1, heads=1, width=8)]'
CONFIGURED = 'return ModelConfig(vocab_size=raw["vocab_size"], max_positions=64, hidden_size=8)'
WRONG = [
    (TABLE, "return []", "dgpp_bindings", "list: []", "BindingTable"),
    (TABLE, "return BindingTable(('embed',))", "dgpp_bindings", "`$.tensors[0]`", "BindingTable"),
    (
        TABLE,
        TABLE.replace("vocab_size, 8", "vocab_size, 8.0"),
        "dgpp_bindings",
        "`$.tensors[0].shape[1]`",
        "BindingTable",
    ),
    (
        TABLE,
        TABLE.replace('role="embedding"', 'role="embeding"'),
        "dgpp_bindings",
        "`$.tensors[0].role`",
        "BindingTable",
    ),
    (TABLE, "pass", "dgpp_bindings", "NoneType: None", "BindingTable"),
    (GROUPS, GROUPS.replace("[", "").replace("]", ""), "dgpp_groups", "PagedGroup", "a list or tuple of state groups"),
    (GROUPS, GROUPS.replace("layers=1", "layers='1'"), "dgpp_groups", "`$[0].layers`", "state groups"),
    (GROUPS, "return [3]", "dgpp_groups", "`$[0]`", "state groups"),
    (CONFIGURED, "return dict(raw)", "read_config of alpha", "dict", "ModelConfig or a subclass of it"),
    (CONFIGURED, CONFIGURED.replace("64", "None"), "read_config of alpha", "`$.max_positions`", "ModelConfig"),
    ("return Built()", "return 5", "dgpp_build", "int without the method forward, logits", "dgpp_core.api.Model"),
]


@pytest.mark.parametrize(("old", "new", "hook", "found", "expected"), WRONG)
def test_a_wrong_result_is_refused(
    shelf: Any, edited: Edit, old: str, new: str, hook: str, found: str, expected: str
) -> None:
    model = model_of(shelf, edited(old, new))
    calls: dict[str, Callable[[], object]] = {
        "dgpp_bindings": lambda: model.bindings(CONFIG),
        "dgpp_groups": lambda: model.groups(CONFIG),
        "read_config of alpha": lambda: model.read_config({"vocab_size": 16}),
        "dgpp_build": lambda: model.build(CONFIG, None),  # type: ignore[arg-type]
    }
    with pytest.raises(PluginError) as caught:
        calls[hook]()
    assert caught.value.what == f"`{hook}` returned the wrong thing"
    assert found in caught.value.found
    assert expected in caught.value.expected
    assert f"(entry point alpha = shelf_alpha), {shelf.folder / 'shelf_alpha.py'}:" in caught.value.where


OPTIONAL = [
    ("dgpp_drafter(): return 5", "int without the method observe, propose"),
    ("dgpp_drafter(): return type('D', (Built,), {'depth': None})()", "no integer `depth`"),
    ("dgpp_dialect(): return 'chatml'", "str: 'chatml'"),
    ("dgpp_memory_plan(): return 12", "int"),
    ("dgpp_memory_plan(): return [12]", "`$[0]`"),
    ("dgpp_routes(): return 'route'", "str"),
]


@pytest.mark.parametrize(("hook", "found"), OPTIONAL)
def test_a_wrong_result_of_an_optional_hook_is_refused(shelf: Any, edited: Edit, hook: str, found: str) -> None:
    model = model_of(shelf, edited("class Built:", f"@hookimpl\ndef {hook}\n\n\nclass Built:"))
    calls: dict[str, Callable[[], object]] = {
        "dgpp_drafter": lambda: model.drafter(CONFIG, None, None),  # type: ignore[arg-type]
        "dgpp_dialect": model.dialect,
        "dgpp_memory_plan": lambda: model.plan_terms(CONFIG, 1, {}),
        "dgpp_routes": model.hooks.routes,
    }
    name = hook.partition("(")[0]
    with pytest.raises(PluginError, match=f"`{name}` returned the wrong thing") as caught:
        calls[name]()
    assert found in caught.value.found


@pytest.mark.parametrize(
    ("new", "found"),
    [
        ("return None", "NoneType"),
        ("return ['alpha']", "list of str"),
        ("return (spec('a'), spec('a'))", "the name a twice"),
        ("return (spec(3),)", "`$.name`"),
        ("import msgspec; return (msgspec.structs.replace(spec('a'), read_config=3),)", "read_config = 3"),
        ("import msgspec; return (msgspec.structs.replace(spec('a'), shorten=3),)", "shorten = 3"),
        ("import msgspec; return (msgspec.structs.replace(spec('a'), architectures='A'),)", "`$.architectures`"),
    ],
)
def test_wrong_models_keep_the_plugin_out(shelf: Any, edited: Edit, new: str, found: str) -> None:
    source = (
        edited('return (spec("MODEL"),)', new).replace("name.title()", "str(name)").replace("+ name", "+ str(name)")
    )
    host = host_of(shelf, source)
    assert host.models() == {}
    (problem,) = host.problems
    assert problem.what.startswith("`dgpp_models`")
    assert found in problem.found


def test_a_familys_own_config_may_hold_anything(shelf: Any, edited: Edit) -> None:
    own = "return Own(vocab_size=16, max_positions=64, hidden_size=8, width=Built)"
    source = edited(CONFIGURED, own).replace(
        "def read_config", "class Own(ModelConfig, frozen=True, kw_only=True):\n    width: type\n\n\ndef read_config"
    )
    config = model_of(shelf, source).read_config({})
    assert config.width.__name__ == "Built"  # type: ignore[attr-defined]
