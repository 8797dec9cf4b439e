"""What reaches the engine: sampling over its defaults, limits, stops and seeds."""

from __future__ import annotations

from typing import Any

import pytest

from dgpp_core.server.options import SamplingOverrides
from dgpp_core.testing.fake_worker import FakeScript


def submitted(running: Any, **fields: Any) -> dict[str, Any]:
    """The `Submit` of a chat request with ``fields``."""
    before = len(running.messages("submit"))
    assert running.chat(**fields).status_code == 200
    found: dict[str, Any] = running.messages("submit")[before]
    return found


def test_defaults_are_the_checkpoints(fake: Any) -> None:
    submit = submitted(fake, seed=5)
    params = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.0, "seed": 5,
              "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": []}  # fmt: skip
    assert submit["params"] == params
    assert submit["eos_ids"] == [1]
    assert submit["logprobs"] == -1
    assert submit["use_cache"] is True
    assert submit["max_tokens"] == 256


def test_the_request_goes_before_everything(fake: Any) -> None:
    submit = submitted(
        fake, temperature=0, top_p=0.5, top_k=3, min_p=0.25, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, seed=-1, logit_bias={"7": -100, "02": 1.5}, max_completion_tokens=9, ignore_eos=True,
        prefix_cache=False, logprobs=True, top_logprobs=4,
    )  # fmt: skip
    params = {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5,
              "presence_penalty": -1.0, "frequency_penalty": 2.0, "seed": 2**64 - 1,
              "logit_bias": [[2, 1.5], [7, -100.0]]}  # fmt: skip
    assert submit["params"] == params
    assert (submit["eos_ids"], submit["logprobs"], submit["use_cache"], submit["max_tokens"]) == ([], 4, False, 9)


def test_no_mass_is_the_best_token(fake: Any) -> None:
    params = submitted(fake, top_p=0, seed=0)["params"]
    assert (params["top_p"], params["top_k"]) == (1.0, 1)


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e-4])
def test_tiny_temperatures_are_taken(fake: Any, temperature: float) -> None:
    assert submitted(fake, temperature=temperature)["params"]["temperature"] == temperature


def test_command_line_over_checkpoint(serve_fake: Any) -> None:
    sampling = SamplingOverrides(temperature=0.0, min_p=0.5)
    with serve_fake(FakeScript(), sampling=sampling, seed=11, default_max_tokens=7, no_eos=True) as running:
        submit = submitted(running, n=2)
        defaults = running.openai().models.retrieve("fake").sampling["defaults"]
        seeds = [message["params"]["seed"] for message in running.messages("submit")]
    assert (submit["params"]["temperature"], submit["params"]["min_p"]) == (0.0, 0.5)
    assert (submit["max_tokens"], submit["eos_ids"]) == (7, [])
    assert defaults == {"temperature": 0.0, "top_p": 0.9, "top_k": 20, "min_p": 0.5, "repetition_penalty": 1.0}
    assert seeds == [11, 12]


def test_unknown_fields_are_ignored_and_known_ones_echoed(fake: Any) -> None:
    reply = fake.chat(preserveThinking=True, service_tier="auto", metadata={"job": "é" * 512}, user="me").json()
    assert reply["service_tier"] == "default"
    assert reply["metadata"] == {"job": "é" * 512}
    plain = fake.chat().json()
    assert "service_tier" not in plain
    assert "metadata" not in plain


def test_reasoning_may_stay_in_the_text(serve_fake: Any, fake: Any) -> None:
    from dgpp_core.testing.fake_worker import FakeReply

    script = FakeScript(replies=(FakeReply(text="<think>Hm.</think>Red."),))
    with serve_fake(script, reasoning_in_content=True) as running:
        message = running.chat().json()["choices"][0]["message"]
    assert message["content"] == "<think>Hm.</think>Red."
    assert "reasoning_content" not in message


def test_a_thought_that_takes_the_whole_limit_is_told_apart(fake: Any) -> None:
    """Thinking that consumes max_tokens: the content is empty, and the reply says why."""
    messages = [{"role": "user", "content": "ponder"}]
    reply = fake.chat(messages=messages, max_tokens=4).json()
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == 4


def test_a_long_body_is_prepared_beside_the_streams(serve_fake: Any) -> None:
    with serve_fake(FakeScript(context_tokens=200_000)) as running:
        long = [{"role": "user", "content": "Red, yellow and blue. " * 3000}]
        reply = running.chat(messages=long).json()
    assert reply["usage"]["prompt_tokens"] > 10_000
    assert reply["choices"][0]["message"]["content"] == "Red, yellow and blue."
