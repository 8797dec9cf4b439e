"""The engine process over a real socket: boot, refusal, service, and what it says when it cannot go on."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cluster.channel import read_exactly
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.messages import (
    VERSION,
    Beat,
    Boot,
    Cancel,
    Ending,
    Failed,
    FromEngine,
    Output,
    Ready,
    Shutdown,
    Submit,
    decode_from_engine,
    encode,
)

SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16)


class Engine:
    """A started engine process and our end of its socket."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(120)
        command = [sys.executable, "-m", "dgpp_core.cluster.worker", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {"OMP_NUM_THREADS": "1"})
        theirs.close()

    def send(self, message: Boot | Submit | Cancel | Shutdown) -> None:
        self.sock.sendall(encode(message))

    def until(self, kind: type[FromEngine]) -> FromEngine:
        while True:
            head = read_exactly(self.sock, 4)
            assert head is not None, f"the engine closed before {kind.__name__}"
            body = read_exactly(self.sock, int.from_bytes(head, "little"))
            assert body is not None
            if isinstance(message := decode_from_engine(body), kind):
                return message

    def ending(self, request: int) -> tuple[list[int], Ending]:
        tokens: list[int] = []
        while True:
            output = self.until(Output)
            assert isinstance(output, Output)
            tokens += [t for update in output.updates if update.id == request for t in update.tokens]
            for ending in output.endings:
                if ending.id == request:
                    return tokens, ending


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("dgpp_llama")
    model, path = load_plugins(environ={}).model("smollm2"), tmp_path_factory.mktemp("tiny")
    raw = model.spec.tiny_config
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, path, seed=4)
    return path


@pytest.fixture
def engine() -> Iterator[Engine]:
    started = Engine()
    timer = threading.Timer(180, started.process.kill)
    timer.start()
    yield started
    timer.cancel()
    started.sock.close()
    started.process.wait(30)


def boot(folder: Path, **changes: object) -> Boot:
    settings = msgspec.json.encode(SETTINGS)
    plain = {"version": VERSION, "model": "smollm2", "checkpoint": str(folder), "device": "cpu", "settings": settings}
    return Boot(**(plain | changes))  # type: ignore[arg-type]


def test_it_serves_beats_and_leaves_in_order(engine: Engine, folder: Path) -> None:
    engine.send(boot(folder))
    ready = engine.until(Ready)
    assert isinstance(ready, Ready)
    assert ready.row_exact
    assert "the plan fits" in ready.plan
    engine.send(Submit(id=1, tokens=(1, 2, 3), max_tokens=5, params=GREEDY))
    tokens, ending = engine.ending(1)
    assert len(tokens) == 5
    assert ending.reason == "length"
    engine.send(Submit(id=2, tokens=(4,) * 40, max_tokens=400, params=GREEDY))
    engine.until(Output)
    engine.send(Cancel(2))
    assert engine.ending(2)[1].reason == "cancelled"
    beat = engine.until(Beat)
    assert isinstance(beat, Beat)
    engine.send(Shutdown())
    assert engine.process.wait(30) == 0


def test_a_request_it_cannot_take_ends_alone(engine: Engine, folder: Path) -> None:
    engine.send(boot(folder))
    engine.until(Ready)
    engine.send(Submit(id=1, tokens=(1, 2, 3), max_tokens=30, params=GREEDY))
    engine.send(Submit(id=2, tokens=(1, 512), max_tokens=5, params=GREEDY))
    refused = engine.ending(2)[1]
    assert refused.reason == "error"
    assert "512" in refused.error
    assert engine.ending(1)[1].reason == "length"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"version": 999}, "different versions"), ({"model": "nobody"}, "nobody"),
        ({"checkpoint": "/nowhere"}, "/nowhere"), ({"device": "warp"}, "warp"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(
    engine: Engine, folder: Path, changes: dict[str, object], named: str
) -> None:
    engine.send(boot(folder, **changes))
    failed = engine.until(Failed)
    assert isinstance(failed, Failed)
    assert named in failed.what
    assert engine.process.wait(30) == failed.exit_code != 0


def test_it_goes_when_the_front_end_goes(engine: Engine, folder: Path) -> None:
    engine.send(boot(folder))
    engine.until(Ready)
    engine.sock.close()
    assert engine.process.wait(30) == 0
