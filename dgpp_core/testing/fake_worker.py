"""An engine process without a model: ``python -m dgpp_core.testing.fake_worker --fd N --script FILE --record FILE``.

It speaks the engine's side of the messages and spells texts that a script gives, at a pace and with the faults that the
script asks for. Tokens depend on the prompt alone, so that a test knows every reply.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
import tokenizers

from dgpp_core.engine.operations import TokenLogprobs
from dgpp_core.scheduler.messages import (
    VERSION,
    Beat,
    Boot,
    Cancel,
    Ending,
    Failed,
    FromEngine,
    Loading,
    Output,
    Ready,
    Reason,
    Shutdown,
    Stats,
    Stop,
    Submit,
    ToEngine,
    Update,
    decode_to_engine,
    encode,
)

BEAT_S = 0.2
HANG_S = 120.0
LAG_TOKENS = 1
"""Tokens that still come after a `Stop`: the real engine is a step ahead too."""


class FakeReply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is said to a prompt that contains ``match``: ``tokens``, or else ``text`` as the tokenizer spells it."""

    match: str = ""
    text: str = ""
    tokens: tuple[int, ...] = ()


class FakeFault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong once ``after_tokens`` tokens have been generated in all.

    ``exit`` leaves with status 7, ``raise`` says `Failed` first, ``hang`` says nothing any more, ``stall`` beats on
    without progress, ``garbage`` sends a frame that is none, ``error`` ends one request with an error and goes on,
    ``refuse`` fails before it is ready.
    """

    kind: Literal["exit", "raise", "hang", "stall", "garbage", "error", "refuse"]
    after_tokens: int = 0


class FakeScript(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the fake behaves.

    Attributes:
        replies: the first whose ``match`` is in the prompt counts.
        step_ms, prefill_ms: time a decode step and a prompt take.
        tokens_per_step: tokens a request gets a step.
        cached_tokens: reported as reused from the prefix cache.
        slots: requests that run at once.
        eos_id: what ends a reply of a request that names no end ids.
        vocab_size: 0 takes the tokenizer's.
        constrained: says that replies are held to grammars, and writes the script all the same.
        stats: what the beats say of what the fake does not have: blocks, caches, drafts.
    """

    replies: tuple[FakeReply, ...] = (FakeReply(text="Red, yellow and blue."),)
    step_ms: float = 0.0
    prefill_ms: float = 0.0
    load_ms: float = 0.0
    tokens_per_step: int = 1
    cached_tokens: int = 0
    slots: int = 8
    context_tokens: int = 4096
    vocab_size: int = 0
    eos_id: int = 0
    constrained: bool = False
    fault: FakeFault | None = None
    stats: Stats = Stats()


class _Running:
    """A request in a slot."""

    def __init__(self, submit: Submit, tokens: Iterator[int], decodes_at: float) -> None:
        self.submit, self.tokens, self.decodes_at = submit, tokens, decodes_at
        self.generated = 0
        self.lag: int | None = None


class FakeWorker:
    """The engine's loop. ``send`` and ``inbox`` are its two ends of the socket."""

    def __init__(self, script: FakeScript, tokenizer: tokenizers.Tokenizer | None, channel: _Channel) -> None:
        self._script, self._tokenizer, self._channel = script, tokenizer, channel
        self._queue: deque[Submit] = deque()
        self._running: dict[int, _Running] = {}
        self._endings: list[Ending] = []
        self.leaving = False
        self.progress = 0
        self._generated = self._finished = self._cancelled = 0
        self._failed_once = False

    @property
    def vocab_size(self) -> int:
        """Ids that the fake may use."""
        known = self._tokenizer.get_vocab_size() if self._tokenizer is not None else 1024
        return self._script.vocab_size or known

    def beat(self) -> Beat:
        """The state of now."""
        busy = bool(self._queue or self._running)
        now = time.monotonic()
        stats = msgspec.structs.replace(
            self._script.stats,
            ticks=self.progress,
            active=len(self._running),
            prefilling=sum(request.decodes_at > now for request in list(self._running.values())),
            queued=len(self._queue),
            slots=self._script.slots,
            requests_finished=self._finished,
            requests_cancelled=self._cancelled,
            tokens_generated=self._generated,
        )
        return Beat(self.progress, busy, stats)

    def loop(self) -> None:
        """Serve until told to leave, or until the front end is gone."""
        while not self.leaving:
            idle = not (self._queue or self._running or self._endings)
            for message in self._channel.take(wait=idle):
                self._receive(message)
            self._step()
            if self._script.step_ms and self._running:
                time.sleep(self._script.step_ms / 1e3)

    def _receive(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._queue.append(message)
        elif isinstance(message, Cancel):
            self._cancel(message.id)
        elif isinstance(message, Stop):
            if (request := self._running.get(message.id)) is not None:
                request.lag = LAG_TOKENS
        elif isinstance(message, Shutdown):
            self.leaving = True

    def _cancel(self, wanted: int) -> None:
        waiting = [submit for submit in self._queue if submit.id == wanted]
        for submit in waiting:
            self._queue.remove(submit)
        if waiting or self._running.pop(wanted, None) is not None:
            self._cancelled += 1
            self._endings.append(Ending(wanted, "cancelled"))

    def _step(self) -> None:
        now = time.monotonic()
        while self._queue and len(self._running) < self._script.slots:
            submit = self._queue.popleft()
            self._running[submit.id] = _Running(submit, self._tokens(submit), now + self._script.prefill_ms / 1e3)
        updates = [self._advance(request) for request in list(self._running.values()) if request.decodes_at <= now]
        endings, self._endings = tuple(self._endings), []
        if updates or endings:
            self.progress += 1
            self._channel.send(Output(tuple(updates), endings))
        elif self._running:
            time.sleep(0.001)
        fault = self._script.fault
        if fault is not None and self._generated >= fault.after_tokens and updates:
            self._fail(fault.kind)

    def _advance(self, request: _Running) -> Update:
        submit = request.submit
        tokens: list[int] = []
        reason: Reason | None = None
        while reason is None and len(tokens) < self._script.tokens_per_step:
            token = next(request.tokens)
            tokens.append(token)
            request.generated += 1
            if request.lag is not None:
                request.lag -= 1
                reason = "stop" if request.lag == 0 else None
            if token in submit.eos_ids:
                reason = "eos"
            elif request.generated == submit.max_tokens:
                reason = "length"
        self._generated += len(tokens)
        if reason is not None:
            del self._running[submit.id]
            self._finished += 1
            self._endings.append(Ending(submit.id, reason, self._script.cached_tokens))
        logprobs = tuple(fake_logprobs(token, submit.logprobs, self.vocab_size) for token in tokens)
        return Update(submit.id, tuple(tokens), logprobs if submit.logprobs >= 0 else None)

    def _tokens(self, submit: Submit) -> Iterator[int]:
        """The scripted reply, then an end id; again and again for a request that ignores it."""
        prompt = ""
        if self._tokenizer is not None:
            prompt = self._tokenizer.decode(list(submit.tokens), skip_special_tokens=False)
        reply = next((reply for reply in self._script.replies if reply.match in prompt), FakeReply())
        tokens = list(reply.tokens)
        if reply.text and self._tokenizer is not None:
            tokens = self._tokenizer.encode(reply.text, add_special_tokens=False).ids
        end = submit.eos_ids[0] if submit.eos_ids else self._script.eos_id
        return itertools.cycle([*tokens, end])

    def _fail(self, kind: str) -> None:
        if kind == "exit":
            os._exit(7)
        if kind == "raise":
            self._channel.send(Failed("the fake engine failed", "as its script says", 5))
            os._exit(5)
        if kind == "garbage":
            self._channel.send_raw(b"\x05\x00\x00\x00junk!")
        if kind == "hang":
            self._channel.silence()
            time.sleep(HANG_S)
        if kind == "stall":
            time.sleep(HANG_S)
        if kind == "error" and not self._failed_once and self._running:
            self._failed_once = True
            request = self._running.pop(next(iter(self._running)))
            self._endings.append(Ending(request.submit.id, "error", error="as its script says"))


def fake_logprobs(token: int, top: int, vocab_size: int) -> TokenLogprobs:
    """The log probability that the fake gives ``token``, and ``top`` alternatives, the token itself first."""
    logprob = -(token % 7 + 1) / 8
    return TokenLogprobs(logprob, tuple(((token + rank) % vocab_size, logprob - rank) for rank in range(max(top, 0))))


class _Channel:
    """Frames over a socket, read by a thread of its own."""

    def __init__(self, sock: socket.socket, record: Path | None) -> None:
        self._sock = sock
        self._record = record.open("ab", buffering=0) if record is not None else None
        self._arrived: deque[ToEngine] = deque()
        self._some = threading.Event()
        self._lock = threading.Lock()

    def receive(self) -> ToEngine:
        """The next message; ends the process when the other end is closed."""
        size = int.from_bytes(self._read(4), "little")
        message = decode_to_engine(self._read(size))
        if self._record is not None and not isinstance(message, Boot):
            self._record.write(msgspec.json.encode(message) + b"\n")
        return message

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            if not part:
                os._exit(0)
            data += part
        return bytes(data)

    def start(self) -> None:
        """Read on in the background."""
        threading.Thread(target=self._pump, daemon=True).start()

    def _pump(self) -> NoReturn:
        while True:
            self._arrived.append(self.receive())
            self._some.set()

    def take(self, *, wait: bool) -> list[ToEngine]:
        """What has arrived, waiting for something if ``wait``."""
        if wait:
            self._some.wait()
        self._some.clear()
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def send(self, message: FromEngine) -> None:
        """Write a message."""
        self.send_raw(encode(message))

    def send_raw(self, frame: bytes) -> None:
        """Write bytes as they are."""
        with self._lock:
            self._sock.sendall(frame)

    def silence(self) -> None:
        """Send nothing any more."""
        self._lock.acquire()


def _beat_on(worker: FakeWorker, channel: _Channel) -> NoReturn:
    while True:
        channel.send(worker.beat())
        time.sleep(BEAT_S)


def main() -> None:
    """Run as an engine process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--script", type=Path)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    script = msgspec.json.decode(arguments.script.read_bytes(), type=FakeScript) if arguments.script else FakeScript()
    channel = _Channel(socket.socket(fileno=arguments.fd), arguments.record)
    boot = channel.receive()
    assert isinstance(boot, Boot), boot
    if script.fault is not None and script.fault.kind == "refuse":
        channel.send(Failed("the fake engine does not start", "as its script says", 2))
        return
    channel.send(Loading("weights", 50, 100))
    time.sleep(script.load_ms / 1e3)
    file = Path(boot.checkpoint) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file)) if file.exists() else None
    worker = FakeWorker(script, tokenizer, channel)
    channel.send(
        Ready(
            version=VERSION,
            pid=os.getpid(),
            vocab_size=worker.vocab_size,
            context_tokens=script.context_tokens,
            position_ceiling=script.context_tokens,
            pool_tokens=script.context_tokens * script.slots,
            constrained=script.constrained,
            row_exact=True,
            load_seconds=script.load_ms / 1e3,
            plan="",
        )
    )
    channel.start()
    threading.Thread(target=_beat_on, args=(worker, channel), daemon=True).start()
    worker.loop()


if __name__ == "__main__":
    main()
