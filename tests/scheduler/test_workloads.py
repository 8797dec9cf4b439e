"""Random workloads on a fake engine: every promise at every tick, and each reply equal to that of a lone request."""

import os
import random
import subprocess
import sys

import msgspec
import pytest

from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.scheduler import Scheduler, TickInput
from dgpp_core.testing.fake_engine import hashed_pick
from dgpp_core.testing.scheduler_world import SchedulerWorld

VOCAB = 7
BATCH = 250
SEEDS = range(0, 3000, BATCH)


def random_limits(rng: random.Random) -> Limits:
    snapshots = rng.choice([None, None, 0, 1, 3, 8, 24])
    return Limits(
        slots=rng.randint(1, 5),
        blocks=rng.randint(12, 40),
        block_tokens=rng.choice([2, 4]),
        snapshots=snapshots or 0,
        needs_snapshot=snapshots is not None,
        queue=rng.choice([3, 64]),
        admission=rng.choice(["full", "grow", "grow"]),
        admission_window=rng.choice([0, 1, 4, 8]),
        prefill_budget=rng.choice([0, 1, 3, 8]),
        prefill_idle_budget=rng.choice([0, 5, 20]),
        depth=rng.randint(0, 3),
        max_context=rng.choice([24, 60]),
        prefix_cache=rng.random() < 0.8,
        snapshot_least=rng.choice([0, 0, 6]),
        snapshot_heads=rng.random() < 0.5,
        decode_rows_match_prefill=rng.random() < 0.8,
    )


def submit_random(world: SchedulerWorld, rng: random.Random, stem: list[int]) -> None:
    start = stem[: rng.choice([0, 4, 9, 16])]
    if world.endings and rng.random() < 0.4:  # the next turn of a conversation
        name = rng.choice(sorted(world.endings))
        start = [*world.submits[name].tokens, *world.replies[name]]
    tokens = start + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 8))]
    eos = (0,) if rng.random() < 0.3 else ()
    turns = tuple(sorted(rng.sample(range(1, len(tokens) + 1), k=min(len(tokens), rng.randint(0, 3)))))
    world.submit(tokens, rng.randint(0, 24), eos_ids=eos, use_cache=rng.random() < 0.9, turns=turns)


def play(seed: int) -> SchedulerWorld:
    """One workload to its end. Some requests are invalid, some are cancelled or stopped at any time."""
    rng = random.Random(seed)
    limits = random_limits(rng)
    world = SchedulerWorld(
        limits,
        lag=rng.randint(0, 1),
        pick=hashed_pick(VOCAB),
        accept=lambda request, position: (request * 7 + position * 13 + seed) % (limits.depth + 1),
    )
    stem = [rng.randrange(VOCAB) for _ in range(16)]
    count, pace, hurry = rng.randint(1, 14), rng.choice([0.1, 0.5, 1.0]), rng.choice([0.0, 0.02])
    while len(world.submits) < count or not world.scheduler.idle:
        while len(world.submits) < count and rng.random() < pace:
            submit_random(world, rng, stem)
        for name in world.submits:
            if rng.random() < hurry:
                rng.choice((world.cancel, world.stop))(name)
        world.tick()
        assert len(world.inputs) < 5000
    return world


@pytest.mark.parametrize("first", SEEDS)
def test_every_promise_holds_in_random_workloads(first: int) -> None:
    hits = preempted = evicted = refused = 0
    for seed in range(first, first + BATCH):
        try:
            world = play(seed)
            world.verify()
        except Exception as error:
            pytest.fail(f"seed {seed}: {error!r}")
        stats = world.scheduler.stats()
        hits, preempted, evicted = (
            hits + stats.cache_hits,
            preempted + stats.requests_preempted,
            evicted + stats.cache_evictions,
        )
        refused += sum(ending.reason == "error" for ending in world.endings.values())
    assert min(hits, preempted, evicted, refused) > 10, "the workloads reach what they are meant to test"


REPLAY = """
import sys, msgspec
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.scheduler import Scheduler, TickInput
for limits, inputs in msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[tuple[Limits, list[TickInput]]]):
    scheduler = Scheduler(limits)
    for each in inputs:
        scheduler.tick(each)
    print(scheduler.digest)
"""


def test_a_replay_in_another_process_with_another_hash_seed_gives_the_same_digests() -> None:
    worlds = [play(seed) for seed in range(9000, 9040)]
    journal = msgspec.msgpack.encode([(world.limits, world.inputs) for world in worlds])
    expected = [world.scheduler.digest for world in worlds]
    assert len(set(expected)) == len(worlds)
    for hash_seed in ("1", "4242"):
        command = [sys.executable, "-c", REPLAY]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, input=journal, env=environment, capture_output=True, check=True, timeout=120)
        assert [int(line) for line in done.stdout.split()] == expected


def test_another_input_gives_another_digest() -> None:
    world = play(9008)
    at = next(at for at, inputs in enumerate(world.inputs) if inputs.submissions)
    first = world.inputs[at].submissions[0]
    changed = msgspec.structs.replace(first, tokens=(*first.tokens[:-1], first.tokens[-1] + 1))
    digests = []
    for submit in (first, changed):
        scheduler = Scheduler(world.limits)
        scheduler.tick(TickInput(submissions=(submit,)))
        digests.append(scheduler.digest)
    assert digests[0] != digests[1]
