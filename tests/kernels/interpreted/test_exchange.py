"""The bus's kernel in the interpreter: what it sends and what it makes of what peers sent, by the host's protocol.

The interpreter knows no assembly, so the two functions that have some are replaced by ones that do not wait. The
peers' messages are there before the kernel starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dgpp_core.bus.device import kernel
from dgpp_core.bus.device.launch import meta_of, tensor_of, words_of
from dgpp_core.bus.fold import fold
from dgpp_core.bus.slab import Bytes, Geometry, Slab

RANK, TAG, SLOT = 1, 77, 256


@triton.jit
def there_or_not(cell, generation, bit, abort, limit):  # type: ignore[no-untyped-def]
    found = tl.load(cell.to(tl.pointer_type(tl.int32)), mask=bit != 0, other=0)
    return tl.where((bit != 0) & (found != generation), 1, 0)


@triton.jit
def stored(address, value):  # type: ignore[no-untyped-def]
    tl.store(address.to(tl.pointer_type(tl.uint64)), value.to(tl.uint64))


@pytest.fixture(autouse=True)
def without_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_arrived", there_or_not)
    monkeypatch.setattr(kernel, "_publish", stored)


class Rank:
    """Rank 1 of a world whose other ranks' messages this test writes."""

    def __init__(self, world: int, channels: int = 3) -> None:
        self.geometry = Geometry(world=world, channels=channels, slot_bytes=SLOT)
        self.slab = Slab(self.geometry, bytearray(self.geometry.size))
        self.state = torch.zeros(channels + 1, dtype=torch.int32)

    def arrive(self, source: int, channel: int, generation: int, message: Bytes) -> None:
        self.slab.put(self.geometry.slot(source, channel, generation), message, source, generation, TAG)

    def launch(self, x: Tensor, out: Tensor, dtype: torch.dtype, blocks: int, *, reduce: bool, striped: bool) -> None:
        meta: dict[str, Any] = meta_of(self.geometry, RANK, dtype, reduce=reduce, striped=striped)
        del meta["num_warps"]
        words = torch.from_numpy(self.slab.bytes).view(torch.int32)
        kernel.exchange[(blocks,)](x, out, words, self.state, len(x), TAG, 10**9, **meta)

    def sent(self, destination: int, channel: int, generation: int) -> bytes:
        """What the posting loop would send, with its seal checked."""
        word = int(self.slab.ready[2 * channel + (generation & 1)])
        assert word & 0xFFFFFFFF == generation
        offset = self.geometry.row(channel, generation) + (word >> 32) * destination
        taken = self.slab.take(offset, RANK, generation)
        assert taken is not None
        assert taken[0].tag == TAG
        return taken[1].tobytes()


def part(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    source = torch.Generator().manual_seed(rank)
    spread = torch.randn(count, generator=source) * 10.0 ** torch.randint(-4, 4, (count,), generator=source)
    return torch.where(torch.rand(count, generator=source) < 0.2, -0.0, spread).to(dtype)


def raw(words: Tensor) -> Bytes:
    found: Bytes = words.numpy().view(np.uint8)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("count", [5, 64, 150])
def test_a_sum_in_one_hop(world: int, dtype: torch.dtype, count: int) -> None:
    """Twice in a row, so that both slots are used."""
    rank = Rank(world)
    parts = [words_of(part(r, count, dtype)) for r in range(world)]
    blocks = -(-len(parts[0]) * 4 // SLOT)
    for generation in (1, 2):
        for channel in range(blocks):
            piece = slice(channel * SLOT, (channel + 1) * SLOT)
            for source in set(range(world)) - {RANK}:
                rank.arrive(source, channel, generation, raw(parts[source])[piece])
        out = torch.empty_like(parts[0])
        rank.launch(parts[RANK], out, dtype, blocks, reduce=True, striped=False)
        like = part(RANK, count, dtype)
        expected = fold([tensor_of(words, like) for words in parts])
        assert torch.equal(tensor_of(out, like).view(torch.uint8), expected.view(torch.uint8))
        sent = b"".join(rank.sent(0, channel, generation) for channel in range(blocks))
        assert sent == raw(parts[RANK]).tobytes()
    assert rank.slab.fault == 0


@pytest.mark.parametrize("world", [2, 3])
def test_a_gather(world: int) -> None:
    rank, count = Rank(world), 100
    rows = [torch.arange(count, dtype=torch.int32) * 7 + r for r in range(world)]
    for channel in range(2):
        for source in set(range(world)) - {RANK}:
            rank.arrive(source, channel, 1, raw(rows[source])[channel * SLOT : (channel + 1) * SLOT])
    out = torch.empty(world, count, dtype=torch.int32)
    rank.launch(rows[RANK], out, torch.int32, 2, reduce=False, striped=False)
    assert torch.equal(out, torch.stack(rows))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("spare", [0, 3, 70])
def test_a_sum_in_two_hops(world: int, spare: int) -> None:
    """Every rank's stretch goes to its rank; its fold comes back, and all folds stand in their places."""
    rank, stretch = Rank(world), SLOT // 4
    count = 2 * world * stretch - spare
    parts = [part(r, count, torch.float32) for r in range(world)]
    total, out = fold(parts).view(torch.int32), torch.zeros(count, dtype=torch.int32)

    def piece(channel: int, owner: int) -> slice:
        start = (channel * world + owner) * stretch
        return slice(start, min(start + stretch, count))

    others = set(range(world)) - {RANK}
    for channel in range(2):
        for source in others:
            rank.arrive(source, channel, 1, raw(parts[source].view(torch.int32)[piece(channel, RANK)]))
            rank.arrive(source, channel, 2, raw(total[piece(channel, source)]))
    rank.launch(parts[RANK].view(torch.int32), out, torch.float32, 2, reduce=True, striped=True)
    for channel in range(2):
        assert torch.equal(out[piece(channel, RANK)], total[piece(channel, RANK)])
        for peer in others:
            mine = raw(parts[RANK].view(torch.int32)[piece(channel, peer)])
            assert rank.sent(peer, channel, 1) == mine.tobytes()
    rank.launch(out, out, torch.float32, 2, reduce=False, striped=True)
    assert torch.equal(out, total)
    assert rank.sent(0, 0, 2) == raw(total[piece(0, RANK)]).tobytes()


def test_a_peer_that_is_missing_is_told_to_the_host_and_no_more_is_tried() -> None:
    rank, x = Rank(4), torch.ones(8)
    for source in (0, 3):
        rank.arrive(source, 0, 1, raw(x))
    for _ in range(2):
        rank.launch(x.view(torch.int32), torch.empty(8, dtype=torch.int32), x.dtype, 1, reduce=True, striped=False)
    assert rank.slab.fault == (kernel.SILENT << 56) | (1 << 2 << 48) | (0 << 32) | 1
    assert rank.slab.ready[:2].tolist() == [0, 1], "generation 1 alone, in its row"
    assert rank.state.tolist() == [1, 0, 0, 1]


@pytest.mark.parametrize("tag", [TAG, TAG + 1])
def test_a_message_that_does_not_fit_its_seal_is_not_taken(tag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "TRIES", tl.constexpr(3))
    rank, x = Rank(2), torch.ones(8)
    offset = rank.geometry.slot(0, 0, 1)
    rank.slab.put(offset, raw(x), 0, 1, tag)
    if tag == TAG:
        rank.slab.bytes[offset + 64] ^= 1
    rank.launch(x.view(torch.int32), torch.empty(8, dtype=torch.int32), x.dtype, 1, reduce=True, striped=False)
    assert rank.slab.fault >> 56 == kernel.DAMAGED
