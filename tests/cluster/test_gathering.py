"""An idle engine waits a moment for company of its first request, and no longer; replies do not depend on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec
import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cluster.boot import served_by
from dgpp_core.cluster.channel import Channel, read_exactly
from dgpp_core.cluster.rank import Rank
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.messages import Output, Shutdown, Submit, decode_from_engine, encode
from dgpp_core.testing.world import World

SETTINGS = EngineSettings(max_concurrency=4, kv_capacity=2048, block_tokens=16, prefix_cache_gib=0.0)
LONG = 1000
"""Milliseconds: the most that the setting takes, so that a wait that is cut short is far from it."""


class Told(msgspec.Struct):
    """What a front end was told of its requests, and how long it took in seconds."""

    tokens: dict[int, list[int]]
    seconds: float


Serve = Callable[[int], AbstractContextManager[tuple[Rank, socket.socket]]]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    folder = tmp_path_factory.mktemp("tiny")
    model = load_plugins(environ={}).model("smollm2")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, folder, seed=4, dtype="F32")

    @contextmanager
    def start(gather_ms: int) -> Iterator[tuple[Rank, socket.socket]]:
        settings = msgspec.structs.replace(SETTINGS, admission_gather_ms=gather_ms)
        engine = World.from_checkpoint(model, folder, settings).engine
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        channel = Channel(theirs, on_close=lambda: None)
        channel.start()
        rank = Rank(served_by(engine, settings), channel, time.monotonic, CompileCounter(), "tiny")
        thread = threading.Thread(target=rank.run)
        thread.start()
        yield rank, ours
        ours.sendall(encode(Shutdown()))
        thread.join(30)
        assert not thread.is_alive()
        ours.close()
        theirs.close()

    return start


def told(sock: socket.socket, requests: Sequence[int], pause: float = 0.0) -> Told:
    began = time.monotonic()
    for request in requests:
        tokens = (1, 2, 3 + request)
        sock.sendall(encode(Submit(id=request, tokens=tokens, max_tokens=4, params=GREEDY, eos_ids=())))
        time.sleep(pause)
    found: dict[int, list[int]] = {request: [] for request in requests}
    ended = 0
    while ended < len(requests):
        head = read_exactly(sock, 4)
        assert head is not None
        message = decode_from_engine(read_exactly(sock, int.from_bytes(head, "little")) or b"")
        assert isinstance(message, Output)
        for update in message.updates:
            found[update.id].extend(update.tokens)
        ended += len(message.endings)
    return Told(found, time.monotonic() - began)


def test_requests_that_come_together_share_their_steps(serve: Serve) -> None:
    with serve(LONG) as (first, sock):
        together = told(sock, (0, 1), pause=0.1).tokens
    with serve(0) as (second, sock):
        apart = told(sock, (0,)).tokens | told(sock, (1,)).tokens
    assert together == apart
    assert all(len(tokens) == 4 for tokens in apart.values())
    shared, single = first.beat().stats, second.beat().stats
    assert shared.decode_rows == single.decode_rows
    assert shared.decode_steps * 2 == single.decode_steps


def test_as_many_as_run_at_once_wait_for_nobody(serve: Serve) -> None:
    with serve(LONG) as (_, sock):
        full = told(sock, range(SETTINGS.max_concurrency))
        alone = told(sock, (9,))
    assert alone.seconds >= LONG / 1e3
    assert full.seconds < alone.seconds
