"""Frames of the journal: whole in any pieces, and whatever happens to one is noticed and named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgpp_core.api import EngineError
from dgpp_core.cluster.frames import MAX_BODY, Packer, Unpacker
from dgpp_core.cluster.records import Compiled, FromFollower, Gone, encode, from_follower

RECORDS: list[FromFollower] = [Compiled(1), Gone("a fault", "its details", 2), Compiled(2**40), Compiled(3)]


def frames() -> list[bytes]:
    packer = Packer()
    return [packer.pack(encode(record)) for record in RECORDS]


def unpacker() -> Unpacker[FromFollower]:
    return Unpacker(from_follower, "rank 1")


@given(st.lists(st.integers(0, 200)))
def test_records_are_whole_however_the_bytes_come(cuts: list[int]) -> None:
    data = b"".join(frames())
    marks = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader = unpacker()
    pieces = [data[start:end] for start, end in pairwise(marks)]
    assert [record for piece in pieces for record in reader.feed(piece)] == RECORDS


@given(st.integers(0, 10_000))
def test_a_flipped_bit_is_noticed(at: int) -> None:
    data = bytearray(b"".join(frames()))
    at %= 8 * len(data)
    data[at // 8] ^= 1 << at % 8
    found: list[FromFollower] = []
    raised = ""
    try:
        found += unpacker().feed(bytes(data))
    except EngineError as error:
        raised = error.where
    assert found == RECORDS[: len(found)], "nothing wrong is believed"
    assert len(found) < len(RECORDS)
    waited_for = at < 32 + 8 * sum(map(len, frames()[: len(found)]))  # a length that grew: the rest is to come
    assert "rank 1" in raised or waited_for


@pytest.mark.parametrize(("order", "named"), [((0, 2), "frame 1"), ((0, 0), "frame 1"), ((1,), "frame 0")])
def test_a_frame_that_is_missing_or_comes_twice_is_noticed(order: tuple[int, ...], named: str) -> None:
    data = b"".join(frames()[at] for at in order)
    with pytest.raises(EngineError, match="journal is damaged") as raised:
        list(unpacker().feed(data))
    assert named in raised.value.where


def test_what_is_no_record_is_refused() -> None:
    with pytest.raises(EngineError, match="damaged") as raised:
        list(unpacker().feed(Packer().pack(b"\x80")))
    assert "record" in raised.value.expected
    with pytest.raises(EngineError, match="damaged") as raised:
        list(unpacker().feed((MAX_BODY + 1).to_bytes(4, "little") + bytes(8)))
    assert str(MAX_BODY + 1) in raised.value.found
