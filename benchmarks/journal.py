"""What leading other ranks costs rank 0's host: ``python benchmarks/journal.py [--world 2] [--out FILE]``.

Rank 0's loop over an engine that computes nothing, at eight streams, alone and with followers that are processes of
their own behind real sockets, in turns. Microseconds a step of the loop's thread: on the clock, and of processor time,
which other programs of the machine disturb less. Between steps rank 0 waits, as it would for its device.

The goal: at most 300 microseconds more than alone.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.api import DgppError
from dgpp_core.cluster.follower import Follower
from dgpp_core.cluster.hub import Hub
from dgpp_core.cluster.member import Member, connect, join
from dgpp_core.cluster.rank import Rank, Served, World
from dgpp_core.cluster.records import Era, Heartbeat, Vote
from dgpp_core.cluster.stream import OperationStream
from dgpp_core.cluster.vigil import Patience
from dgpp_core.engine.compiles import CompileCounter
from dgpp_core.sampling.params import GREEDY
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit
from dgpp_core.scheduler.scheduler import Scheduler
from dgpp_core.scheduler.stepper import Stepper
from dgpp_core.testing.fake_world import TERMS, FakeFrontEnd, FakeWorld, hello

STREAMS, STEPS, ROUNDS, PROMPT = 8, 400, 5, 512
DEVICE_S = 0.002
GOAL_US = 300
LIMITS = Limits(slots=STREAMS, blocks=1024, block_tokens=16, max_context=2048, prefill_budget=0, prefix_cache=False)
PATIENCE = Patience(silent=30.0, stalled=30.0)


class Figures(msgspec.Struct, frozen=True):
    """Microseconds a step: medians over the steps of a run."""

    clock: float
    processor: float


def main() -> None:
    """Measure, print, and store where that is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rounds = [(measure(1), measure(options.world)) for _ in range(ROUNDS)]
    found: dict[str, Any] = {
        "command": f"python benchmarks/journal.py --world {options.world}",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "streams": STREAMS, "steps": STEPS, "rounds": ROUNDS, "goal_us": GOAL_US,
    }  # fmt: skip
    for kind in Figures.__struct_fields__:
        alone, leading = (statistics.median(getattr(row[at], kind) for row in rounds) for at in (0, 1))
        more = statistics.median(getattr(lead, kind) - getattr(one, kind) for one, lead in rounds)
        found[kind] = {"alone_us": alone, "leading_us": leading, "more_us": more}
        print(f"{kind:>9}: alone {alone:7.1f} us, leading {options.world - 1} {leading:7.1f} us, more {more:7.1f} us")
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


def measure(world: int) -> Figures:
    """One run of rank 0's loop, alone where ``world`` is 1."""
    front = FakeFrontEnd()
    if world == 1:
        return _steps(Rank(served(), front, time.monotonic, CompileCounter(), "fake"), front)
    stream = OperationStream()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = multiprocessing.get_context("spawn")
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        others = [context.Process(target=follow, args=(rank, world, address)) for rank in range(1, world)]
        for process in others:
            process.start()
        era = Era(epoch=1, world=world, model="fake", settings=b"", fabric_port=1)
        hub = Hub(listener, hello(0, world), era, stream, PATIENCE, time.monotonic, lambda: _beat(stream), _fail)
        hub.gather(120.0, lambda what: None)
        hub.vote(TERMS, 0.0, lambda what: None)
        rank = Rank(served(), front, time.monotonic, CompileCounter(), "fake", world=World(hub.leader, stream))
        figures = _steps(rank, front)
        hub.finish()
        for process in others:
            process.join()
    return figures


def served() -> Served:
    """An engine that computes nothing."""
    return FakeWorld.served(LIMITS)


def _steps(rank: Rank, front: FakeFrontEnd) -> Figures:
    """Steps of eight replies, after those that began them."""
    prompts = [[(7 * at + stream) % 1000 for at in range(PROMPT)] for stream in range(STREAMS)]
    rank.step(
        [Submit(id=at, tokens=tuple(ids), max_tokens=STEPS + 20, params=GREEDY) for at, ids in enumerate(prompts)]
    )
    for _ in range(10):
        rank.step([])
    clock, processor = [], []
    for _ in range(STEPS):
        time.sleep(DEVICE_S)
        before, spent = time.perf_counter(), time.thread_time()
        rank.step([])
        processor.append(time.thread_time() - spent)
        clock.append(time.perf_counter() - before)
    while not rank.idle:
        rank.step(front.drain(0))
    assert all(len(front.replies[at]) == STEPS + 20 for at in range(STREAMS)), "every reply is whole"
    return Figures(statistics.median(clock) * 1e6, statistics.median(processor) * 1e6)


def follow(rank: int, world: int, address: str) -> None:
    """A follower's process."""
    stream, one = OperationStream(), served()
    link, _ = join(connect(address, 60.0), hello(rank, world), PATIENCE, 60.0)
    member = Member(link, PATIENCE, time.monotonic, lambda: _beat(stream), _fail)
    member.start()
    stepper = Stepper(Scheduler(LIMITS), stream.witness(one.executor), lag=0, deliver=lambda out: None)
    follower = Follower(stepper, stream, member.post, lambda grammar, done: done())
    member.post(Vote(TERMS))
    while not follower.apply(member.next()):
        pass
    member.close()


def _beat(stream: OperationStream) -> Heartbeat:
    step, digest = stream.head
    return Heartbeat(step=step, digest=digest, phase="waiting", age=0.0)


def _fail(error: DgppError) -> None:
    print(error, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
