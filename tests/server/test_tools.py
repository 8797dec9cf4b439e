"""Tool calls over HTTP with the official client: every dialect, streamed and not, and every request that is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.testing.tool_replies import dialect
from dgpp_core.text.tools.dialect import Call, ToolDialect
from dgpp_core.text.tools.rules import tool_of

TURNS = (
    "{%- for tool in tools or [] -%}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{%- endfor -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] -%}CALL{%- endfor -%}<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
)
ARGUMENT = "{%- for key, value in call.function.arguments | items -%}PAIR{%- endfor -%}"
VALUE = "{{ value if value is string else value | tojson }}"
QWEN = "{{ '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}PAIRS{{ '</function>\n</tool_call>' }}"
FORMS = {
    "glm": ("<tool_call>{{ call.function.name }}PAIRS</tool_call>",
            "<arg_key>{{ key }}</arg_key><arg_value>VALUE</arg_value>"),
    "qwen": (QWEN, "{{ '<parameter=' ~ key ~ '>\n' }}VALUE{{ '\n</parameter>\n' }}"),
    "compact": ("<tool_call><function={{ call.function.name }}>PAIRS</function></tool_call>",
                "<parameter={{ key }}>VALUE</parameter>"),
    "dsml": ("{{ call | tojson }}", ""),
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    "required": ["city"],
}
WEATHER = {"type": "function", "function": {"description": "é", "name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "get_time"}}
TOOLS: Any = [WEATHER, CLOCK]
CALLS = (Call("weather", {"city": '5 "Köln"\n', "days": 3, "where": {"x": [1.50, "</"]}}), Call("get_time", {}))
ARGUMENTS = ['{"city": "5 \\"Köln\\"\\n", "days": 3, "where": {"x": [1.5, "</"]}}', "{}"]
PATCH = '*** Begin\n-"5"\n+\\n é\n*** End\n'
USER: Any = [{"role": "user", "content": "colors"}]


def template(name: str) -> str:
    call, pair = FORMS[name]
    pairs = ARGUMENT.replace("PAIR", pair.replace("VALUE", VALUE))
    return TURNS.replace("CALL", call.replace("PAIRS", pairs))


def script(spoken: ToolDialect, **fields: Any) -> FakeScript:
    calls = spoken.render(CALLS, after_text=True)
    cut = spoken.render(CALLS[:1])
    return FakeScript(
        replies=(
            FakeReply(match="ponder", text=f"<think>First it.</think>\n\nI look.{calls}\n"),
            FakeReply(match="hurry", text=f"<think>I think about it{spoken.render(CALLS[1:])}"),
            FakeReply(match="silent", text=spoken.render(CALLS[1:])),
            FakeReply(match="missing", text=spoken.render([Call("patch", {})])),
            FakeReply(match="patch", text=spoken.render([Call("patch", {"input": PATCH})])),
            FakeReply(match="broken", text=f"So: {cut[: len(cut) * 2 // 3]}"),
            FakeReply(match="prose", text="Red."),
            FakeReply(match="", text=f"I look.{calls}"),
        ),
        **fields,
    )


Start = Callable[..., contextlib.AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def start(serve_fake: Any, write_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """``with start(name) as running``: a front end whose model writes that dialect."""

    @contextlib.contextmanager
    def start(name: str, **fields: Any) -> Iterator[Any]:
        spoken = dialect(name)
        folder: Path = write_checkpoint(
            tmp_path_factory.mktemp(name), ("<think>", "</think>", *spoken.markers), template(name)
        )
        with serve_fake(script(spoken, **fields), model=folder, default_max_tokens=2000) as running:
            yield running

    return start


@pytest.fixture(scope="module", params=FORMS)
def speaking(start: Start, request: pytest.FixtureRequest) -> Iterator[Any]:
    with start(request.param) as running:
        yield running


@pytest.fixture(scope="module")
def glm(start: Start) -> Iterator[Any]:
    with start("glm") as running:
        yield running


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def joined(chunks: Any) -> dict[str, Any]:
    """A stream as its clients put it together."""
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": []}
    for chunk in chunks:
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or []:
                if call.index == len(found["calls"]):
                    assert call.type == "function"
                    assert call.function.arguments == ""
                    found["calls"].append([call.id, call.function.name, ""])
                else:
                    assert call.id is None
                    assert call.function.name is None
                found["calls"][call.index][2] += call.function.arguments
            if choice.finish_reason:
                found["finish"].append(choice.finish_reason)
    return found


@pytest.mark.parametrize(
    ("prompt", "reasoning", "content", "made"),
    [
        ("colors", "", "I look.", [0, 1]),
        ("ponder", "First it.", "\n\nI look.", [0, 1]),
        ("hurry", "I think about it", None, [1]),
        ("silent", "", None, [1]),
    ],
)
def test_calls_whole_and_streamed(speaking: Any, prompt: str, reasoning: str, content: str | None, made: Any) -> None:
    """A call ends reasoning (jayleaton/glm53-tensorfold-spark W20), a turn may be a call alone (vllm#50512), a call may
    have no arguments (vllm#44326), and both ways have one finish_reason (python-genai#2868)."""
    expected = [("weather", ARGUMENTS[0]), ("get_time", ARGUMENTS[1])]
    client = speaking.openai()
    whole = client.chat.completions.create(model="fake", messages=say(prompt), tools=TOOLS, seed=3).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content == content
    assert (getattr(whole.message, "reasoning_content", None) or "") == reasoning
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert calls == [expected[at] for at in made]
    assert all(call.id.startswith("call_") and len(call.id) == 21 for call in whole.message.tool_calls)
    stream = joined(
        client.chat.completions.create(model="fake", messages=say(prompt), tools=TOOLS, seed=3, stream=True)
    )
    assert (stream["content"], stream["reasoning"]) == (content or "", reasoning)
    assert stream["finish"] == ["tool_calls"]
    assert stream["calls"] == [[call.id, *said] for call, said in zip(whole.message.tool_calls, calls, strict=True)]


def test_the_clients_own_accumulator(speaking: Any) -> None:
    with speaking.openai().chat.completions.stream(model="fake", messages=USER, tools=TOOLS) as stream:
        for _ in stream:
            pass
        found = stream.get_final_completion().choices[0]
    assert [call.function.arguments for call in found.message.tool_calls] == ARGUMENTS
    assert found.finish_reason == "tool_calls"


@pytest.mark.parametrize("step", [2, 4, 8])
def test_several_tokens_a_step(start: Start, step: int) -> None:
    """vllm#34449: arguments were garbled when a step brought several tokens."""
    with start("glm", tokens_per_step=step) as running:
        found = joined(running.openai().chat.completions.create(model="fake", messages=USER, tools=TOOLS, stream=True))
    assert [arguments for _, _, arguments in found["calls"]] == ARGUMENTS


def test_a_conversation_goes_on_after_a_call(speaking: Any) -> None:
    client = speaking.openai()
    first = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "prose"} for call in first.tool_calls]
    before = len(speaking.messages("submit"))
    turn: Any = [*USER, first.model_dump(exclude_none=True), *results]
    second = client.chat.completions.create(model="fake", messages=turn, tools=TOOLS).choices[0]
    assert (second.message.content, second.finish_reason, second.message.tool_calls) == ("Red.", "stop", None)
    nameless: Any = [*USER, {"role": "assistant", "content": None, "tool_calls": turn[1]["tool_calls"]}, *results]
    client.chat.completions.create(model="fake", messages=nameless, tools=TOOLS)
    prompts = [len(message["tokens"]) for message in speaking.messages("submit")[before:]]
    assert prompts[1] < prompts[0], "without content there is nothing in its place"


def test_a_block_that_the_limit_cuts_is_text(glm: Any) -> None:
    """vllm#37937: an exception when max_tokens fell inside a call. Also vllm#47137: both ways say the same."""
    client = glm.openai()
    for limit in range(1, 40):
        whole = client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, max_tokens=limit).choices[0]
        events: Any = client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS, max_tokens=limit, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = list(events)
        stream = joined(chunks)
        assert chunks[-1].usage.completion_tokens == limit
        assert stream["finish"] == [whole.finish_reason]
        assert stream["content"] == (whole.message.content or "")
        assert [call[1:] for call in stream["calls"]] == [
            [call.function.name, call.function.arguments] for call in whole.message.tool_calls or []
        ]
        assert whole.finish_reason == "length"


def test_a_broken_block_is_text(glm: Any) -> None:
    choice = glm.openai().chat.completions.create(model="fake", messages=say("broken"), tools=TOOLS).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    assert choice.message.content.startswith("So: <tool_call>weather<arg_key>city</arg_key>")


def test_custom_tools(speaking: Any) -> None:
    """Their input is any text: it is not JSON, whatever it looks like."""
    tools: Any = [
        *TOOLS,
        {"type": "custom", "custom": {"name": "patch", "description": "d", "format": {"type": "text"}}},
    ]
    client = speaking.openai()
    (call,) = (
        client.chat.completions.create(model="fake", messages=say("patch"), tools=tools, seed=1)
        .choices[0]
        .message.tool_calls
    )
    assert (call.type, call.custom.name, call.custom.input) == ("custom", "patch", PATCH)
    stream = client.chat.completions.create(model="fake", messages=say("patch"), tools=tools, seed=1, stream=True)
    deltas = [delta for chunk in stream for delta in chunk.choices[0].delta.tool_calls or []]
    first, *others = [delta.model_dump(exclude_none=True) for delta in deltas]
    assert first == {"index": 0, "id": call.id, "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert "".join(delta["custom"]["input"] for delta in others) == PATCH
    before = len(speaking.messages("submit"))
    earlier = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "prose"}
    assert speaking.chat(messages=[*say("patch it"), earlier, result], tools=tools).status_code == 200
    assert len(speaking.messages("submit")[before]["tokens"]) > len(PATCH) // 2


def test_a_custom_call_without_input_is_text(speaking: Any) -> None:
    tools: Any = [{"type": "custom", "custom": {"name": "patch"}}]
    choice = speaking.chat(messages=say("missing"), tools=tools).json()["choices"][0]
    assert "patch" in choice["message"]["content"]
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("stop", False)


def test_prose_never_finishes_with_tool_calls(glm: Any) -> None:
    """vllm#53255."""
    assert glm.chat(messages=say("prose"), tools=TOOLS).json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("choice", ["none", None])
def test_without_tools_markers_are_text(glm: Any, choice: str | None) -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "none"} if choice else {}
    before = len(glm.messages("submit"))
    reply = glm.chat(messages=say("silent"), **fields).json()["choices"][0]
    assert reply["message"]["content"] == "<tool_call>get_time</tool_call>"
    assert reply["finish_reason"] == "stop"
    assert "tool_calls" not in reply["message"]
    plain = len(glm.messages("submit")[before]["tokens"])
    glm.chat(messages=say("silent"), tools=TOOLS)
    assert len(glm.messages("submit")[before + 1]["tokens"]) > plain


def test_ids_are_those_of_the_request(glm: Any) -> None:
    def ids(**fields: Any) -> list[str]:
        choices = glm.chat(**({"tools": TOOLS, "seed": 1, "n": 2} | fields)).json()["choices"]
        return [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]

    first = ids()
    assert len(set(first)) == 4
    assert ids() == first
    assert not set(first) & {*ids(seed=2), *ids(messages=say("other colors"))}


def test_logprobs_leave_calls_out(glm: Any) -> None:
    choice = glm.chat(tools=TOOLS, logprobs=True, messages=say("ponder")).json()["choices"][0]
    shown = "".join(entry["token"] for entry in choice["logprobs"]["content"])
    assert shown == choice["message"]["content"] == "\n\nI look."


def test_a_stop_string_is_not_searched_in_calls(glm: Any) -> None:
    reply = glm.chat(tools=TOOLS, stop=["Köln"]).json()["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    cut = glm.chat(tools=TOOLS, stop=["look"]).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("I ", "stop")
    assert "tool_calls" not in cut["message"]


def test_what_the_template_sees(glm: Any) -> None:
    from dgpp_core.server.requests import ChatRequest
    from dgpp_core.server.tools import read_tools

    given = {"function": WEATHER["function"] | {"x-more": 1, "strict": False}, "extra": 2, "type": "function"}
    flat = {"name": "flat", "parameters": {"properties": {}}, "other": 1}
    request = ChatRequest(model="fake", messages=[1], tools=[given, flat])
    use = read_tools(request, dialect("glm"), None, constrained=False)
    assert json.dumps(use.shown) == json.dumps(
        [
            {"function": WEATHER["function"] | {"strict": False}, "type": "function"},
            {"type": "function", "function": {"name": "flat", "parameters": {"properties": {}}}},
        ]
    )
    assert use.rules is not None
    assert use.rules.tools[0] == tool_of("weather", SCHEMA)


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def function(**members: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | members}]


def custom(**members: Any) -> list[Any]:
    return [{"type": "custom", "custom": {"name": "f"} | members}]


def grammar(**members: Any) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'} | members}


MASKS = "constrained_decoding_unsupported"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [1]}, "tools[0]", None),
        ({"tools": [WEATHER, {"type": "search"}]}, "tools[1].type", None),
        ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function", None),
        ({"tools": [{"type": "function"}]}, "tools[0].name", None),
        ({"tools": function(name="a b")}, "tools[0].function.name", None),
        ({"tools": function(name="a" * 65)}, "tools[0].function.name", None),
        ({"tools": function(description=1)}, "tools[0].function.description", None),
        ({"tools": function(parameters=[])}, "tools[0].function.parameters", None),
        ({"tools": function(strict=1)}, "tools[0].function.strict", None),
        ({"tools": function(strict=True)}, "tools[0].function.strict", MASKS),
        ({"tools": [*function(), {"name": "f"}]}, "tools[1].name", None),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom", None),
        ({"tools": custom(name="")}, "tools[0].custom.name", None),
        ({"tools": custom(format=1)}, "tools[0].custom.format", None),
        ({"tools": custom(format={"type": "x"})}, "tools[0].custom.format.type", None),
        ({"tools": custom(format={"type": "grammar"})}, "tools[0].custom.format.grammar", None),
        ({"tools": custom(format=grammar(syntax="bnf"))}, "tools[0].custom.format.grammar.syntax", None),
        ({"tools": custom(format=grammar(definition=1))}, "tools[0].custom.format.grammar.definition", None),
        ({"tools": custom(format=grammar())}, "tools[0].custom.format", MASKS),
        ({"tools": [*custom(), *function()]}, "tools[1].function.name", None),
        ({"tools": [*function(), *custom()]}, "tools[1].custom.name", None),
        ({"tools": custom(), "tool_choice": named("f")}, "tool_choice.function.name", None),
        ({"tools": custom(), "tool_choice": named("f", "custom")}, "tool_choice", MASKS),
        ({"tools": [WEATHER] * 129}, "tools", None),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", None),
        ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "tool_choice.type", None),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", None),
        ({"tools": TOOLS, "tool_choice": named("f")}, "tool_choice.function.name", None),
        ({"tools": TOOLS, "tool_choice": named("weather", "custom")}, "tool_choice.custom.name", None),
        ({"tools": TOOLS, "tool_choice": named("weather")}, "tool_choice", MASKS),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice", MASKS),
        ({"tools": TOOLS, "tool_choice": allowed("weather")}, "tool_choice", MASKS),
        ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice.allowed_tools.tools", None),
        ({"tools": TOOLS, "tool_choice": allowed("f")}, "tool_choice.allowed_tools.tools[0].function.name", None),
        ({"tools": TOOLS, "tool_choice": allowed("weather", "weather")}, "tool_choice.allowed_tools.tools", None),
        ({"tools": TOOLS, "tool_choice": allowed("weather", mode="none")}, "tool_choice.allowed_tools.mode", None),
        ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", MASKS),
        ({"tool_choice": "auto"}, "tool_choice", None),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", None),
        ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", MASKS),
    ],
)
def test_refusals(glm: Any, fields: Any, param: str, code: str | None) -> None:
    reply = glm.chat(**fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, param, code), error


@pytest.mark.parametrize(
    "fields",
    [{"tools": None, "tool_choice": None, "parallel_tool_calls": None}, {"tools": []}, {"parallel_tool_calls": False},
     {"tools": TOOLS, "tool_choice": "none", "parallel_tool_calls": False}, {"tools": TOOLS, "tool_choice": "auto"}],
)  # fmt: skip
def test_taken(glm: Any, fields: Any) -> None:
    assert glm.chat(**fields).status_code == 200


def test_a_model_without_tools(fake: Any, glm: Any) -> None:
    reply = fake.chat(tools=TOOLS)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (400, "tools", "tools_unsupported")
    assert "the chat template of the checkpoint has no form for tools (leave `tools` out, or serve" in error["message"]
    assert fake.openai().models.retrieve("fake").tools == {"available": False, "constrained": False}
    assert glm.openai().models.retrieve("fake").tools == {"available": True, "constrained": False}


def test_a_template_whose_form_of_calls_is_not_known(serve_fake: Any, write_checkpoint: Any, tmp_path: Any) -> None:
    """Calls as bare JSON: shown to the model, and read by no dialect."""
    bare = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with serve_fake(model=write_checkpoint(tmp_path, (), bare)) as running:
        message = running.chat(tools=TOOLS).json()["error"]["message"]
    assert "no form of calls that is known here" in message
    assert "GLM, DeepSeek, Qwen and MiMo" in message
