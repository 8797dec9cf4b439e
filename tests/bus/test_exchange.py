"""The protocol over slabs, with ports that deliver late and in any order, against a chain of NumPy additions."""

from __future__ import annotations

import itertools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgpp_core.api import EngineError
from dgpp_core.bus.exchange import LAST_START, Exchange
from dgpp_core.bus.native import FOLDER, load
from dgpp_core.bus.posting import PythonPoster, drain, order_of
from dgpp_core.bus.shm.link import CopyPort
from dgpp_core.bus.slab import HEADER, Geometry, Slab, seal

sys.path.insert(0, str(Path(__file__).parent))
import slabs
from slabs import EDGES, chain, exchanges, on_all, part

KINDS = ["python", "native", "unruly", "paced"]


@pytest.fixture(autouse=True, scope="module")
def compiler() -> None:
    try:
        load()
    except EngineError as error:
        pytest.skip(error.line())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sums_are_the_chain_whichever_way_they_go(world: int, kind: str) -> None:
    """Lengths around one slot, one segment and several, one after another on one channel."""
    lengths = [1, 31, 32, 33, 96, 32 * world, 32 * world + 1, 100 * world + 7]
    expected = [chain([part(rank, count, count) for rank in range(world)]).tobytes() for count in lengths]

    def work(exchange: Exchange) -> list[tuple[bytes, bytes]]:
        sums = []
        for count in lengths:
            mine = part(exchange.rank, count, count)
            both = [exchange.all_reduce(mine, chain, segmented=way).tobytes() for way in (False, True)]
            sums.append((both[0], both[1]))
        return sums

    for sums in on_all(exchanges(Geometry(world=world, channels=1, slot_bytes=64), kind), work):
        assert sums == [(right, right) for right in expected]


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 4),
    words=st.lists(st.lists(st.sampled_from(EDGES), min_size=4, max_size=4), min_size=1, max_size=40),
    late=st.permutations(range(4)),
    segmented=st.booleans(),
    kind=st.sampled_from(KINDS),
)
def test_any_numbers_in_any_order_of_arrival(
    world: int, words: list[list[int]], late: list[int], segmented: bool, kind: str
) -> None:
    parts = [np.array([row[rank] for row in words], np.uint16).view(np.uint8) for rank in range(world)]

    def work(exchange: Exchange) -> bytes:
        time.sleep(late[exchange.rank] * 0.002)
        return exchange.all_reduce(parts[exchange.rank], chain, segmented=segmented).tobytes()

    found = on_all(exchanges(Geometry(world=world, channels=1, slot_bytes=64), kind), work)
    assert set(found) == {chain(parts).tobytes()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_gathers_bring_every_byte(world: int, kind: str) -> None:
    def work(exchange: Exchange) -> list[bytes]:
        return [
            row.tobytes()
            for count in (1, 2, 3, 63, 64, 65, 200)
            for row in exchange.all_gather(np.full(count, 7 + exchange.rank, np.uint8))
        ]

    expected = [bytes([7 + rank]) * count for count in (1, 2, 3, 63, 64, 65, 200) for rank in range(world)]
    assert on_all(exchanges(Geometry(world=world, channels=1, slot_bytes=64), kind), work) == [expected] * world


@pytest.mark.parametrize("kind", ["native", "unruly"])
def test_ranks_that_run_ahead_overwrite_nothing(kind: str) -> None:
    """Two slots are enough, whoever is slow and when; generations pass 2^32 on the way."""

    def work(exchange: Exchange) -> bool:
        waits = random.Random(exchange.rank)
        for turn in range(60):
            time.sleep(waits.choice([0, 0, 0, 0.001]))
            rows = exchange.swap([np.full(64, turn + 3 * exchange.rank, np.uint8)])
            time.sleep(waits.choice([0, 0, 0.001]))
            if [row[0] for row in rows] != [turn + 3 * rank for rank in range(3)]:
                return False
        return True

    ranks = exchanges(Geometry(world=3, channels=2, slot_bytes=64), kind, channel=1, first=2**32 - 31)
    assert on_all(ranks, work) == [True] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_that_comes_late_sends_both_rows(kind: str) -> None:
    """A rank that has its peer's message goes on, be its own still there: the next one must not take its place."""
    geometry = Geometry(world=2, channels=3, slot_bytes=64)
    both = slabs.slabs_of(geometry)
    poster = slabs.posters(both, kind)[0]
    for first in (1, 3, 0xFFFFFFFE):
        for generation in (first, first + 1):
            payload = np.full(64, generation & 0xFF, np.uint8)
            both[0].put(geometry.row(1, generation), payload, 0, generation, 7)
            both[0].publish(1, generation, 0)
        drain(poster, 10.0)
        for generation in (first, first + 1):
            arrived = both[1].take(geometry.slot(0, 1, generation), 0, generation)
            assert arrived is not None, f"generation {generation} of a loop that came when {first + 1} was ready"
            assert arrived[1].tolist() == [generation & 0xFF] * 64


@pytest.mark.parametrize("kind", ["python", "native", "paced"])
def test_a_late_rank_leaves_nothing_unsent(kind: str) -> None:
    """It has its peers' second piece before its own is due, and nobody turns its loop once it has gone on."""
    ranks = exchanges(Geometry(world=3, channels=1, slot_bytes=6400), kind, timeout=3.0)

    def work(exchange: Exchange) -> list[int]:
        time.sleep(0.0 if exchange.rank else 0.3)
        return [int(row.sum()) for row in exchange.all_gather(np.full(6464, exchange.rank, np.uint8))]

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, ranks)) == [[0, 6464, 2 * 6464]] * 3


class Ended(slabs.Calm):
    """A watch that learns of the world's end, but of no peer's."""

    def fault(self, source: int) -> EngineError | None:
        return EngineError("the world was given up") if source == 0 else None


@pytest.mark.parametrize(
    ("watch", "said"), [(slabs.Calm(), r"could not be sent within 0\.05 s"), (Ended(), "the world was given up")]
)
def test_a_row_that_is_not_due_in_time_is_an_error(watch: slabs.Calm, said: str) -> None:
    """An hour a message: the first goes at once, the second has to wait for it."""
    both = slabs.slabs_of(Geometry(world=2, channels=1, slot_bytes=64))
    slow = PythonPoster(both[0], 0, CopyPort(both[0], both), pace=60.0, burst=0)
    exchange = Exchange(both[0], 0, slow, watch, timeout=0.05)
    for generation in (1, 2):
        slot = both[0].geometry.slot(1, 0, generation)
        both[0].put(slot, np.zeros(64, np.uint8), source=1, generation=generation, tag=0)
    exchange.swap([np.zeros(64, np.uint8)])
    with pytest.raises(EngineError, match=said):
        exchange.swap([np.zeros(64, np.uint8)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_start_works_and_the_next_is_refused(kind: str) -> None:
    """Rows of a fresh slab read as generation 0, which a loop takes for gone."""
    geometry = Geometry(world=2, channels=1, slot_bytes=64)
    ranks = exchanges(geometry, kind, first=LAST_START, timeout=3.0)

    def work(exchange: Exchange) -> list[int]:
        return [
            int(row[0]) for turn in range(5) for row in exchange.swap([np.full(8, 10 * turn + exchange.rank, np.uint8)])
        ]

    assert on_all(ranks, work) == [[0, 1, 10, 11, 20, 21, 30, 31, 40, 41]] * 2
    for first in (-1, LAST_START + 1, 2**32 - 1):
        with pytest.raises(EngineError, match="cannot begin with this generation"):
            exchanges(geometry, kind, first=first)


def test_the_seal_is_the_written_formula() -> None:
    """In integers of any size, one word after another."""
    payload = np.frombuffer(b"abcdefg", np.uint8)
    words = [9, 7, 5, int.from_bytes(b"abcd", "little"), int.from_bytes(b"efg", "little")]
    expected = 0
    for position, word in enumerate(words):
        expected ^= (word + position + 1 + (2 << 32)) * 0x9E3779B97F4A7C15 % 2**64
    assert seal(payload, source=2, generation=9, tag=5) == expected


def test_a_message_counts_only_when_it_is_whole() -> None:
    """Every change of one word of a message, in whatever field, makes it one that has not arrived."""
    geometry = Geometry(world=2, channels=1, slot_bytes=64)
    slab = Slab(geometry, bytearray(geometry.size))
    slot = geometry.slot(1, 0, 3)
    slab.put(slot, np.arange(60, dtype=np.uint8), source=1, generation=3, tag=8)
    assert slab.take(slot, 1, 3) is not None
    assert slab.take(slot, 1, 5) is None
    assert slab.take(slot, 0, 3) is None
    for offset in [0, 4, 8, 16, 20, *range(HEADER, HEADER + 60, 4)]:
        word = slab.bytes[slot + offset : slot + offset + 4]
        word[1] ^= 4
        assert slab.take(slot, 1, 3) is None, offset
        word[1] ^= 4
    assert slab.take(slot, 1, 3) is not None


@pytest.mark.parametrize(
    ("damage", "found"),
    [(None, "generation 0 in its slot"), (HEADER + 5, "a message that does not fit its seal")],
)
def test_what_is_missing_or_damaged_is_named_after_the_timeout(damage: int | None, found: str) -> None:
    geometry = Geometry(world=2, channels=1, slot_bytes=64)
    both = slabs.slabs_of(geometry)
    if damage is not None:
        slot = geometry.slot(1, 0, 1)
        both[0].put(slot, np.zeros(64, np.uint8), source=1, generation=1, tag=0)
        both[0].bytes[slot + damage] = 1
    exchange = Exchange(both[0], 0, slabs.posters(both, "python")[0], slabs.Calm(), timeout=0.05)
    with pytest.raises(EngineError, match=r"no answer from rank 1 within 0\.05 s") as late:
        exchange.swap([np.zeros(64, np.uint8)])
    assert late.value.found == found
    assert late.value.where == "rank 0 of 2, exchange 1"


def test_a_rank_that_issues_another_collective_is_named() -> None:
    def work(exchange: Exchange) -> str:
        with pytest.raises(EngineError) as refused:
            exchange.swap([np.zeros(8, np.uint8)], tag=5 + exchange.rank)
        return refused.value.line()

    first, second = on_all(exchanges(Geometry(world=2, channels=1, slot_bytes=64)), work)
    assert "rank 1 issued another collective" in first
    assert "found: tag 5; expected: tag 6" in second


@pytest.mark.parametrize(("world", "channels", "slot"), [(0, 1, 64), (2, 0, 64), (2, 249, 64), (2, 1, 0), (2, 1, 100)])
def test_a_layout_that_cannot_be_is_refused(world: int, channels: int, slot: int) -> None:
    with pytest.raises(EngineError, match="cannot have this layout"):
        Geometry(world=world, channels=channels, slot_bytes=slot)


def test_nothing_overlaps() -> None:
    geometry = Geometry(world=3, channels=4, slot_bytes=128)
    rows = [geometry.row(c, g) + d * geometry.message_bytes for c in range(4) for g in (0, 1) for d in range(3)]
    slots = [geometry.slot(s, c, g) for s in range(3) for c in range(4) for g in (0, 1)]
    starts = sorted(rows + slots)
    assert all(after - before == geometry.message_bytes for before, after in itertools.pairwise(starts))
    assert starts[-1] + geometry.message_bytes == geometry.size
    assert all(start % HEADER == 0 for start in starts)


def test_peers_are_served_from_the_next_rank_on() -> None:
    assert [order_of(rank, 4) for rank in range(4)] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


def test_a_loop_that_cannot_be_compiled_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no C compiler"):
        load(environ={"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "CC": "/nowhere/cc"})
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'no room' >&2; exit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="does not compile") as refused:
        load(environ={"XDG_CACHE_HOME": str(tmp_path), "CC": str(broken)})
    assert "no room" in refused.value.found
    assert (FOLDER / "layout.h").is_file()
