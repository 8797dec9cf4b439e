import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.api.errors import RequestError, TokenizerError
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.template import ChatTemplate

DATA = Path(__file__).parents[3] / "shared" / "data" / "chat_templates"
TEMPLATES = sorted(path.stem for path in DATA.glob("*.jinja"))
# As the golden files were made: the templates that name a special token spell DeepSeek's.
BAR = chr(0xFF5C)
SPECIAL = {"bos_token": f"<{BAR}begin▁of▁sentence{BAR}>", "eos_token": f"<{BAR}end▁of▁sentence{BAR}>"}
OWN = (Path(__file__).parent / "chat_template.jinja").read_text()


def compiled(name: str) -> ChatTemplate:
    source = (DATA / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, SPECIAL if name.startswith("DeepSeek") else {})


def golden(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((DATA / "golden" / f"{name}.json").read_text(encoding="utf-8"))
    return parsed


@pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates in {DATA}")
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_renders_what_transformers_renders(name: str) -> None:
    template, expected = compiled(name), golden(name)
    assert len(expected) == 18
    for label, conversation in golden("conversations").items():
        want = expected[label]
        arguments = {"tools": conversation["tools"], "kwargs": conversation["template_kwargs"]}
        if "error" in want:
            with pytest.raises(RequestError) as caught:
                template.render(conversation["messages"], **arguments)
            assert caught.value.status == 400
            assert caught.value.param == "messages"
            assert want["error"].split(": ", 1)[1] in caught.value.what, label
        else:
            assert template.render(conversation["messages"], **arguments) == want["prompt"], label


@pytest.mark.skipif(not TEMPLATES, reason=f"no chat templates in {DATA}")
@pytest.mark.parametrize("name", TEMPLATES or ["none"])
def test_normalised_messages_render_the_same_and_never_crash(name: str) -> None:
    template, expected = compiled(name), golden(name)
    for label, conversation in golden("conversations").items():
        messages = normalise_messages(conversation["messages"], template)
        arguments = {"tools": conversation["tools"], "kwargs": conversation["template_kwargs"]}
        if name == "Qwen3.8" and label in ("effort_high", "effort_max"):
            with pytest.raises(RequestError, match="Unexpected reasoning effort"):
                template.render(messages, **arguments)
            continue
        prompt = template.render(messages, **arguments)
        assert "None" not in prompt  # what null content becomes in the golden prompts of GLM
        if label == "null_content" and "prompt" in expected[label]:
            assert prompt == expected[label]["prompt"].replace("\nNone", "").replace("None", "")
        elif label == "content_parts":
            assert "Part one. Part two." in prompt
        elif label == "string_arguments":
            assert "{\\" not in prompt
            assert "Oslo" in prompt
        elif "prompt" in expected[label]:
            assert prompt == expected[label]["prompt"], label


def own(**changes: Any) -> ChatTemplate:
    return ChatTemplate(OWN, {}, **changes)


def test_own_template_renders_messages_tools_and_calls() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é<", "b": [1, None]}}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "banned", "content": "never rendered"},
    ]
    prompt = own().render(messages, tools=[{"name": "f", "x": "<é>"}], kwargs={"enable_thinking": False})
    assert prompt == (
        '<|im_start|>system\nTools:\n{"name": "f", "x": "<é>"}<|im_end|>\n'
        "<|im_start|>user\nab<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>f a="é<" b=[1, null]</tool_call><|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_template_error_is_a_400_with_the_templates_own_words() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]
    with pytest.raises(RequestError, match="the system message must come first") as caught:
        own().render(messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_variables_are_the_ones_a_template_reads() -> None:
    assert own().variables == {"messages", "tools", "add_generation_prompt", "enable_thinking"}
    source = "{% set a = a if a is defined else 1 %}{% set b = 2 %}{{ a ~ b ~ strftime_now('%Y') ~ bos_token }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).variables == {"a", "bos_token"}


def test_special_tokens_and_the_injected_clock() -> None:
    template = ChatTemplate(
        "{{ bos_token }}{{ strftime_now('%d %b %Y') }}",
        {"bos_token": "<s>"},
        clock=lambda: datetime(2026, 2, 3, tzinfo=UTC),
    )
    assert template.render([]) == "<s>03 Feb 2026"


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ range(10**9) }}"])
def test_sandbox_refuses(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, {}).render([])
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' ", "{% endfor %}", "{{ x | nosuchfilter }}", "{%" * 9])
def test_source_that_does_not_compile_is_refused_by_name(source: str) -> None:
    with pytest.raises(TokenizerError, match="does not compile") as caught:
        ChatTemplate(source, {}, name="dir/chat_template.jinja")
    assert caught.value.where.startswith("dir/chat_template.jinja")


def test_which_content_lists_a_template_takes_is_found_by_trying() -> None:
    assert own().part_roles == {"system", "user", "assistant", "tool"}
    assert own().string_list_roles == frozenset()
    plain = ChatTemplate("{% for m in messages %}{{ m.role + m.content }}{% endfor %}", {})
    assert plain.part_roles == frozenset()
    shows_the_list = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert shows_the_list.part_roles == frozenset()
    both = ChatTemplate("{% for m in messages %}{% for i in m.content %}{{ i.text or i }}{% endfor %}{% endfor %}", {})
    assert both.part_roles == both.string_list_roles == {"system", "user", "assistant", "tool"}
