"""Structured replies of a real engine over HTTP: they conform, whole and streamed, and nobody else waits for them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import jsonschema
import pytest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
USER: Any = [{"role": "user", "content": "A person."}]


def ask(running: Any, **fields: Any) -> Any:
    return running.openai().chat.completions.create(
        model=running.model, messages=USER, response_format=FORM, max_tokens=400, **fields
    )


@pytest.mark.parametrize("temperature", [0, 1.3])
def test_replies_conform(tiny: Any, temperature: float) -> None:
    for seed in range(4):
        found = ask(tiny, temperature=temperature, seed=seed)
        (choice,) = found.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        stream = ask(tiny, temperature=temperature, seed=seed, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == choice.message.content
    tiny.await_idle()


def test_several_choices_and_a_limit(tiny: Any) -> None:
    found = ask(tiny, temperature=1.2, seed=1, n=3)
    for choice in found.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    cut = tiny.openai().chat.completions.create(
        model=tiny.model, messages=USER, response_format=FORM, max_tokens=2, temperature=0
    )
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content.lstrip()[:1] in ("{", "")


def test_a_client_that_leaves_takes_its_grammar_along(tiny: Any) -> None:
    stream = ask(tiny, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    tiny.await_idle()
    assert not any(tiny.held().values())


@pytest.mark.slow
@pytest.mark.alone
def test_four_structured_requests_do_not_hold_up_a_stream(tiny: Any) -> None:
    def gaps() -> list[float]:
        stream = tiny.openai().chat.completions.create(
            model=tiny.model, messages=USER, max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        found, last = [], time.monotonic()
        for _ in stream:
            found.append(time.monotonic() - last)
            last = time.monotonic()
        return sorted(found[2:])

    def others(form: Any) -> list[float]:
        threads = [threading.Thread(target=lambda seed=seed: run(form, seed)) for seed in range(4)]
        for thread in threads:
            thread.start()
        found = gaps()
        for thread in threads:
            thread.join(60)
        return found

    def run(form: Any, seed: int) -> None:
        tiny.openai().chat.completions.create(
            model=tiny.model, messages=USER, response_format=form, max_tokens=150, temperature=1, seed=seed,
            extra_body={"ignore_eos": True},
        )  # fmt: skip

    gaps()
    plain, held = others({"type": "text"}), others(FORM)
    at = len(held) * 9 // 10
    print(f"gap ms: plain {plain[at] * 1e3:.1f}, held {held[at] * 1e3:.1f}")
    assert held[at] < 3 * plain[at] + 0.02
