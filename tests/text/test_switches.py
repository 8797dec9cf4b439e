"""What a template makes of the reasoning controls, found by trying it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dgpp_core.text.switches import EFFORTS, find_switches
from dgpp_core.text.template import ChatTemplate

DATA = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
BODY = "{% for m in messages %}{{ m.content }}{% endfor %}"


def efforts(source: str) -> list[str]:
    return list(find_switches(ChatTemplate(source + BODY, {})).efforts.values())


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no chat templates in {DATA}")
@pytest.mark.parametrize(
    ("name", "thinking", "names"),
    [
        ("GLM-5.3-Flash", (), ["low", "low", "high", "high", "max", "max"]),
        ("Qwen3.8", ("enable_thinking",), ["low", "low", "medium", "xhigh", "xhigh", "xhigh"]),
        ("GLM-4.7", ("enable_thinking",), []),
        ("MiMo-V2.6.distill", ("enable_thinking",), []),
        ("Qwen3-Coder-Next", (), []),
    ],
)
def test_real_templates(name: str, thinking: tuple[str, ...], names: list[str]) -> None:
    template = ChatTemplate((DATA / f"{name}.jinja").read_text(encoding="utf-8"), {})
    found = find_switches(template)
    assert found.thinking == thinking
    assert [found.efforts[effort] for effort in EFFORTS] == names if names else not found.efforts
    assert found.ignored == ()
    for effort in found.efforts.values():
        template.render([{"role": "user", "content": "x"}], kwargs={"reasoning_effort": effort})


def test_an_effort_goes_to_what_the_template_knows() -> None:
    strict = "{% if reasoning_effort not in ['medium', undefined] %}{{ raise_exception('no') }}{% endif %}"
    assert efforts(strict + "{{ reasoning_effort }}") == ["medium"] * 6
    assert efforts("{% if reasoning_effort == 'high' %}hard{% endif %}") == [
        "minimal", "low", "high", "high", "max", "max",
    ]  # fmt: skip
    assert efforts("") == []


def test_what_changes_nothing_is_named() -> None:
    reads = "{% if thinking %}{% endif %}{% if enable_thinking %}on{% endif %}{% if clear_thinking %}{% endif %}"
    reads += "{% set level = reasoning_effort %}"
    found = find_switches(ChatTemplate(reads + BODY, {}), ("enable_thinking", "thinking", "deep"))
    assert found.thinking == ("enable_thinking",)
    assert found.efforts == {}
    assert found.ignored == ("thinking", "deep", "clear_thinking", "reasoning_effort")


def test_history_is_tried_with_reasoning_in_it() -> None:
    thought = "{% if not clear_thinking %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    assert find_switches(ChatTemplate("{% for m in messages %}" + thought + "{% endfor %}", {})).ignored == ()
