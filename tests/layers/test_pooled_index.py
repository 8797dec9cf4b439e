"""Rows choose blocks by learned mixtures of keys as their definition says, and alike in every kind of step."""

import pytest
import torch
from torch import Tensor

from dgpp_core.api import ConfigError, StepBatch
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.layers.pooled_index import PooledIndexer

HEADS, WIDTH, RATIO, TOP, BLOCK, LENGTH, STEP, TABLE = 2, 16, 4, 3, 8, 75, 4, 10


class Rig:
    """Two requests; the choice of each row is collected as a mask over the positions."""

    def __init__(self, *, ties: bool = False) -> None:
        source = torch.Generator().manual_seed(12)
        self.q = torch.randn(2, LENGTH, HEADS * WIDTH, generator=source)
        self.k = torch.randn(2, LENGTH, WIDTH, generator=source)
        self.weights = torch.randn(2, LENGTH, WIDTH, generator=source)
        self.gates = torch.randn(2, LENGTH, HEADS, generator=source)
        if ties:
            self.q[:, ::2] = 0.0
        self.norm, self.bias = 1 + 0.2 * torch.randn(WIDTH, generator=source), torch.randn(WIDTH, generator=source)
        self.places = 2 * torch.randn(RATIO, WIDTH, generator=source)
        self.layer = PooledIndexer(
            HEADS, WIDTH, TOP, key_norm=self.norm, key_bias=self.bias, eps=1e-6, places=self.places
        )
        self.pool = torch.full((1 + 2 * TABLE, 1, BLOCK, WIDTH // RATIO), 9.0)
        self.ring = torch.full((2, 1, RATIO - 1 + STEP, 2 * WIDTH), 9.0)
        self.lengths, self.out = [0, 0], [torch.zeros(LENGTH, LENGTH, dtype=torch.bool) for _ in range(2)]

    def step(self, rows: dict[int, int], *, keep: bool, accept: int | None = None) -> None:
        starts = [self.lengths[s] for s in rows]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, rows.values(), strict=True)])
        batch = StepBatch(
            tokens=positions, positions=positions, counts=tuple(rows.values()), slots=torch.tensor(list(rows)),
            lengths=torch.tensor(starts), candidates=torch.zeros(len(rows), dtype=torch.int64), keep_rows=keep,
            block_tables=torch.tensor([[1 + s * TABLE + b for b in range(TABLE)] for s in rows]),
            max_length=max(a + n for a, n in zip(starts, rows.values(), strict=True)),
        )  # fmt: skip
        index = PagedIndex(batch, BLOCK)
        q, k, weights, gates = (
            torch.cat([x[s, self.lengths[s] : self.lengths[s] + n] for s, n in rows.items()])
            for x in (self.q, self.k, self.weights, self.gates)
        )
        chosen = self.layer(q, k, weights, gates, index, self.pool, self.ring, torch.float32)
        masks = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1)[:, :LENGTH] for part in self.padded(chosen)])
        for s, part in zip(rows, torch.split(masks, list(rows.values())), strict=True):
            done = rows[s] if accept is None else accept
            for i in range(done):
                self.out[s][self.lengths[s] + i] = part[i]
            self.lengths[s] += done

    def padded(self, chosen: tuple[Tensor, ...]) -> list[Tensor]:
        """Masks of a common number of tiles."""
        return [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, TABLE - part.shape[1])) for part in chosen]


def plain(rig: Rig, slot: int) -> Tensor:
    """The definition in float64, row by row and block by block."""
    chosen, k = torch.zeros(LENGTH, LENGTH, dtype=torch.bool), rig.k[slot].double()
    centred = k - k.mean(1, keepdim=True)
    k = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * rig.norm.double() + rig.bias.double()
    for t in range(LENGTH):
        scored = []
        for b in range((t + 1) // RATIO):
            own = slice(RATIO * b, RATIO * (b + 1))
            shares = torch.softmax(rig.weights[slot, own].double() + rig.places.double(), 0)
            c = (shares * k[own]).sum(0)
            heads = rig.q[slot, t].double().view(HEADS, WIDTH)
            score = sum(float(g) * max(0.0, float(q @ c)) for g, q in zip(rig.gates[slot, t], heads, strict=True))
            scored.append((-score, b))
        for _, b in sorted(scored)[:TOP]:
            chosen[t, RATIO * b : RATIO * (b + 1)] = True
        chosen[t, (t + 1) // RATIO * RATIO : t + 1] = True
    return chosen


@pytest.mark.parametrize("ties", [False, True])
def test_equals_its_definition(ties: bool) -> None:
    rig = Rig(ties=ties)
    rig.step({1: LENGTH}, keep=False)
    wanted = plain(rig, 1)
    assert torch.equal(rig.out[1], wanted)
    assert (~wanted.diagonal()).any(), "a row that ends a block need not see itself"


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_choice_in_every_kind_of_step(ties: bool) -> None:
    whole = Rig(ties=ties)
    whole.step({1: LENGTH}, keep=False)
    chunks, verified = Rig(ties=ties), Rig(ties=ties)
    for count in (2, 1, 30, 9, 33):
        chunks.step({1: count, 0: count}, keep=False)
    verified.step({1: 13}, keep=False)
    for _ in range(58):
        verified.step({1: 4, 0: 4}, keep=True, accept=1)
    for _ in range(2):
        verified.step({1: 2}, keep=True)
    assert torch.equal(chunks.out[1], whole.out[1])
    assert torch.equal(verified.out[1], whole.out[1])


def test_blocks_that_are_no_whole_number_of_index_blocks_are_refused() -> None:
    rig = Rig()
    rig.pool = rig.pool[:, :, :6]
    with pytest.raises(ConfigError, match="block_tokens"):
        rig.step({0: 4}, keep=False)
