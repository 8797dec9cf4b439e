"""Which model writes calls how, against the templates of real models where they are at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tools.detect import detect_dialect
from dgpp_core.text.tools.dialect import Call
from dgpp_core.text.tools.rules import tool_of

SHARED = Path(__file__).parents[4] / "shared" / "data" / "chat_templates"
GLM = dialect("glm").markers
XML = dialect("qwen").markers
DSML = dialect("dsml").markers
FAMILIES = {
    "GLM-4.6": "glm", "GLM-4.7": "glm", "GLM-5": "glm", "GLM-5.1": "glm", "GLM-5.2": "glm", "GLM-5.3-Flash": "glm",
    "Qwen3-Coder-Next": "qwen", "Qwen3.5": "qwen", "Qwen3.5-0.8B": "qwen", "Qwen3.6": "qwen", "Qwen3.8": "qwen",
    "MiMo-V2.6.distill": "compact",
}  # fmt: skip
OTHERS = ("Qwen3", "Qwen2.5-Instruct")
"""Their calls are JSON between the same markers."""


def real(name: str) -> ChatTemplate:
    return ChatTemplate((SHARED / f"{name}.jinja").read_text(encoding="utf-8"), {})


def detected(markers: Any, template: ChatTemplate | None) -> str | None:
    found = detect_dialect(frozenset(markers).__contains__, template)
    return found and found.name


def test_by_markers() -> None:
    plain = ChatTemplate("{{ messages }}", {})
    assert detected(GLM, plain) == "glm"
    assert detected(DSML, plain) == "dsml"
    assert detected(GLM[:5], plain) is None
    assert detected(XML, plain) is None
    assert detected((), plain) is None
    assert detected(GLM, None) is None


needs_templates = pytest.mark.skipif(not SHARED.exists(), reason=f"no chat templates in {SHARED}")


@needs_templates
@pytest.mark.parametrize("name", FAMILIES)
def test_real_templates(name: str) -> None:
    assert detected(GLM if FAMILIES[name] == "glm" else XML, real(name)) == FAMILIES[name]


@needs_templates
@pytest.mark.parametrize("name", OTHERS)
def test_other_models_with_the_same_markers(name: str) -> None:
    assert detected(XML, real(name)) is None


CALLS = (
    Call("search", {"query": 'a "b" <c> & \\ \n d', "filters": {"lang": "日本語"}, "limit": 3, "exact": True}),
    Call("get_time", {}),
    Call("search", {"query": "", "score": 1.5, "tags": ["x", None]}),
)


@needs_templates
@pytest.mark.parametrize("content", ["", "Checking both."])
@pytest.mark.parametrize("name", ["GLM-4.7", "GLM-5.3-Flash", "Qwen3.8", "Qwen3.6", "MiMo-V2.6.distill"])
def test_calls_are_rendered_as_the_template_does(name: str, content: str) -> None:
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for at, call in enumerate(CALLS)
    ]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in calls),
    ]
    prompt = real(name).render(messages)
    assert content + dialect(FAMILIES[name]).render(CALLS, after_text=bool(content)) in prompt


@needs_templates
def test_deepseeks_form() -> None:
    """Against what the vendor's encoder gives."""
    path, checked = SHARED / "deepseek_v41_flash_goldens.jsonl", 0
    for line in path.read_text(encoding="utf-8").splitlines():
        golden = json.loads(line)
        for message in golden["messages"]:
            made = [call["function"] for call in message.get("tool_calls") or []]
            calls = [Call(call["name"], arguments(call["arguments"])) for call in made]
            if calls and all("::" not in call.name for call in calls):
                checked += 1
                assert (message["content"] or "") + dialect("dsml").render(calls) in golden["prompt"]
    assert checked >= 3


def arguments(value: Any) -> Any:
    value = json.loads(value) if isinstance(value, str) else value
    return value if isinstance(value, dict) else {"arguments": value}


def test_namespaces_stand_in_the_name() -> None:
    tool = tool_of("f", None, namespace="space")
    assert 'name="space::f"' in dialect("dsml").render([Call("f", {})], tools=[tool])
    assert 'name="f"' in dialect("dsml").render([Call("f", {})])
