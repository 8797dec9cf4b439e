"""Paged, windowed and recurrent layers: any chunking, any company and verify steps give the plain result."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.layers.recurrent import scan
from dgpp_core.layers.window import window_attend

HEADS, KV_HEADS, WIDTH, BLOCK, LENGTH, WINDOW = 4, 2, 16, 64, 210, 40


class Rig:
    """Three requests of one layer; each is fed by `step` and its outputs collected in order of position."""

    def __init__(self) -> None:
        self.q = torch.randn(3, LENGTH, HEADS, WIDTH)
        self.k, self.v = torch.randn(2, 3, LENGTH, KV_HEADS, WIDTH)
        self.blocks = 4
        self.k_pool, self.v_pool = torch.zeros(2, 1 + 3 * self.blocks, KV_HEADS, BLOCK, WIDTH)
        self.k_ring, self.v_ring = torch.zeros(2, 3, KV_HEADS, WINDOW + 4, WIDTH)
        self.states = torch.zeros(3, 4, WIDTH)
        self.lengths, self.candidates = [0, 0, 0], [0, 0, 0]
        self.out: list[list[Tensor]] = [[], [], []]

    def step(
        self, layer: Callable[..., Tensor], rows: dict[int, int], *, keep: bool, accept: int | None = None
    ) -> None:
        """Run some rows of some requests; a verify step (``keep``) commits ``accept`` of them."""
        slots, counts = list(rows), tuple(rows.values())
        starts = [self.lengths[s] for s in slots]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
        batch = StepBatch(
            tokens=positions, positions=positions, counts=counts, slots=torch.tensor(slots),
            lengths=torch.tensor(starts),
            block_tables=torch.tensor([[1 + s * self.blocks + b for b in range(self.blocks)] for s in slots]),
            candidates=torch.tensor([self.candidates[s] for s in slots]), keep_rows=keep,
            max_length=max(a + n for a, n in zip(starts, counts, strict=True)),
        )  # fmt: skip
        out = layer(self, batch)
        for s, part in zip(slots, out.split(list(counts)), strict=True):
            done = accept if accept is not None else rows[s]
            self.out[s].append(part[:done])
            self.lengths[s] += done
            self.candidates[s] = done - 1 if keep else 0

    def rows(self, batch: StepBatch, x: Tensor) -> Tensor:
        """The inputs of a batch's rows."""
        parts = [x[s, a : a + n] for s, a, n in zip(batch.slots, batch.lengths, batch.counts, strict=True)]
        return torch.cat(parts)

    def whole(self, slot: int) -> Tensor:
        return torch.cat(self.out[slot])


def paged(rig: Rig, batch: StepBatch) -> Tensor:
    index = PagedIndex(batch, BLOCK)
    index.write(rig.k_pool, rig.rows(batch, rig.k))
    index.write(rig.v_pool, rig.rows(batch, rig.v))
    return index.attend(rig.rows(batch, rig.q), rig.k_pool, rig.v_pool, WIDTH**-0.5)


def windowed(rig: Rig, batch: StepBatch) -> Tensor:
    return window_attend(
        batch, rig.rows(batch, rig.q), rig.rows(batch, rig.k), rig.rows(batch, rig.v), rig.k_ring, rig.v_ring,
        window=WINDOW, scale=WIDTH**-0.5,
    )  # fmt: skip


def recurrent(rig: Rig, batch: StepBatch) -> Tensor:
    def step(state: Tensor, decay: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = state * decay.abs().clamp(max=0.9) + x
        return state, state * 2

    return scan(batch, rig.states, (rig.rows(batch, rig.k[:, :, 0]), rig.rows(batch, rig.v[:, :, 0])), step)


def plain(rig: Rig, layer: Callable[..., Tensor], slot: int) -> Tensor:
    """The layer written out over the whole sequence, in float64."""
    q, k, v = rig.q[slot].double(), rig.k[slot].double(), rig.v[slot].double()
    if layer is recurrent:
        state, outs = torch.zeros(WIDTH, dtype=torch.float64), []
        for i in range(LENGTH):
            state = state * k[i, 0].abs().clamp(max=0.9) + v[i, 0]
            outs.append(state * 2)
        return torch.stack(outs)
    reach = LENGTH if layer is paged else WINDOW
    at = torch.arange(LENGTH)
    mask = (at[None] <= at[:, None]) & (at[None] > at[:, None] - reach)
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * WIDTH**-0.5
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(~mask, -torch.inf), -1), v)


LAYERS = [paged, windowed, recurrent]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("layer", LAYERS)
def test_every_way_through_gives_the_same_bits(layer: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    whole = Rig()
    whole.step(layer, {0: LENGTH}, keep=False)
    assert torch.allclose(whole.whole(0).double(), plain(whole, layer, 0), rtol=1e-4, atol=1e-5)

    torch.manual_seed(3)
    chunks = Rig()
    for count in (1, 63, 2, 64, 7, 73):
        chunks.step(layer, {0: count, 1: 5 + count // 2}, keep=False)
    assert torch.equal(chunks.whole(0), whole.whole(0))

    torch.manual_seed(3)
    decoded = Rig()
    decoded.step(layer, {0: 100, 2: 30}, keep=False)
    decoded.step(layer, {1: 60}, keep=False)
    while decoded.lengths[0] < LENGTH:
        decoded.step(layer, {0: 1, 1: 1, 2: 1}, keep=True)
    assert torch.equal(decoded.whole(0), whole.whole(0))


@pytest.mark.parametrize("layer", LAYERS)
def test_rejected_rows_leave_no_trace(layer: Callable[..., Tensor]) -> None:
    torch.manual_seed(3)
    whole = Rig()
    whole.step(layer, {0: LENGTH}, keep=False)
    torch.manual_seed(3)
    verified = Rig()
    verified.step(layer, {0: 90}, keep=False)
    accepted = [1, 4, 2, 3, 1]
    while verified.lengths[0] + 4 <= LENGTH:
        accept = accepted[verified.lengths[0] % 5]
        true = verified.v.clone(), verified.k.clone()
        start = verified.lengths[0]
        verified.v[0, start + accept : start + 4] = torch.randn(4 - accept, KV_HEADS, WIDTH) * 9
        verified.k[0, start + accept : start + 4] = torch.randn(4 - accept, KV_HEADS, WIDTH) * 9
        verified.step(layer, {0: 4}, keep=True, accept=accept)
        verified.v, verified.k = true
    done = verified.lengths[0]
    assert torch.equal(verified.whole(0), whole.whole(0)[:done])
