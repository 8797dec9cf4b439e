"""A grammar that is slow to compile: the others' steps go on meanwhile, and its request can be cancelled."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cluster.boot import served_by
from dgpp_core.cluster.channel import Channel, read_exactly
from dgpp_core.cluster.rank import Rank
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.messages import Cancel, Output, Shutdown, Submit, decode_from_engine, encode
from dgpp_core.testing.world import World
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary

END = 256
SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=2048, block_tokens=16, prefix_cache_gib=0.0)
QUICK = Grammar(source=sources.regex("[0-9]{3}"), ends=(END,))
SLOW = Grammar(
    source=sources.json_schema({"type": "integer", "multipleOf": 99_991, "minimum": 0}),
    ends=(END,),
)


class FrontEnd:
    """The other end of a rank's socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}
        self.times: dict[int, list[float]] = {}

    def send(self, message: Submit | Cancel | Shutdown) -> None:
        self.sock.sendall(encode(message))

    def submit(self, request: int, grammar: Grammar | None = None, tokens: int = 60) -> None:
        ends = (END,) if grammar else ()
        self.send(Submit(id=request, tokens=(1, 2, 3), max_tokens=tokens, params=GREEDY, eos_ids=ends, grammar=grammar))

    def read(self, *requests: int) -> None:
        """Until each of them has ended."""
        while not set(requests) <= set(self.ended):
            head = read_exactly(self.sock, 4)
            assert head is not None
            message = decode_from_engine(read_exactly(self.sock, int.from_bytes(head, "little")) or b"")
            assert isinstance(message, Output)
            for update in message.updates:
                self.tokens.setdefault(update.id, []).extend(update.tokens)
                self.times.setdefault(update.id, []).append(time.monotonic())
            for ending in message.endings:
                assert ending.id not in self.ended, ending
                self.ended[ending.id] = ending.reason


@pytest.fixture
def front_end(tmp_path: Path) -> Iterator[FrontEnd]:
    model = load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=4, dtype="F32")
    engine = World.from_checkpoint(model, tmp_path, SETTINGS).engine
    pieces = [*(bytes([byte]) for byte in range(256)), b"<end>"]
    engine.offer_grammars(Vocabulary(pieces, frozenset({END}), frozenset(), engine.vocab_size, END))
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    channel = Channel(theirs, on_close=lambda: None)
    channel.start()
    rank = Rank(served_by(engine, SETTINGS), channel, time.monotonic, CompileCounter(), "tiny")
    thread = threading.Thread(target=rank.run)
    thread.start()
    found = FrontEnd(ours)
    yield found
    found.send(Shutdown())
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def test_steps_go_on_while_a_grammar_is_compiled(front_end: FrontEnd) -> None:
    front_end.submit(0, tokens=1500)
    front_end.submit(1, SLOW)
    front_end.submit(2, QUICK)
    front_end.read(0, 1, 2)
    assert front_end.ended.pop(1) in ("eos", "length")
    assert front_end.ended == {0: "length", 2: "eos"}
    assert bytes(token for token in front_end.tokens[1] if token != END).strip().isdigit()
    assert front_end.times[2][-1] < front_end.times[1][0], "the quick one did not wait"
    before = [moment for moment in front_end.times[0] if moment < front_end.times[1][0]]
    assert len(before) > 20, "steps went on"


def test_a_request_is_cancelled_while_its_grammar_is_compiled(front_end: FrontEnd) -> None:
    front_end.submit(1, SLOW)
    front_end.send(Cancel(1))
    front_end.submit(2, QUICK)
    front_end.read(1, 2)
    assert front_end.ended == {1: "cancelled", 2: "eos"}
    front_end.submit(3, SLOW)
    front_end.read(3)
    assert 1 not in front_end.tokens
