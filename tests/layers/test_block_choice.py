"""Rows choose blocks of keys as the definition says, by pooled keys of either kind, and alike in every kind of step."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
import torch
from torch import Tensor

from dgpp_core.api import ConfigError, StepBatch
from dgpp_core.layers.block_index import BlockIndexer
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.layers.pooled_index import PooledIndexer
from dgpp_core.ops.rope import RotaryTable

HEADS, WIDTH, RATIO, TOP, TURNED, BLOCK, LENGTH, STEP, TABLE = 2, 16, 4, 3, 8, 8, 75, 4, 10


class Rig(ABC):
    """Two requests; the choice of each row is collected as a mask over the positions.

    Attributes:
        given: what the indexer is handed of each request's rows, ``[2, LENGTH, ...]`` each, queries and keys first.
        kept: of a key, in widths.
    """

    given: tuple[Tensor, ...]
    kept = 1

    def __init__(self, *, ties: bool = False) -> None:
        source = torch.Generator().manual_seed(12)
        self.given = tuple(torch.randn(2, LENGTH, size, generator=source) for size in (HEADS * WIDTH, WIDTH))
        if ties:
            self.given[0][:, ::2] = 0.0
        self.make(source)
        self.pool = torch.full((1 + 2 * TABLE, 1, BLOCK, WIDTH // RATIO), 9.0)
        self.ring = torch.full((2, 1, RATIO - 1 + STEP, self.kept * WIDTH), 9.0)
        self.lengths, self.out = [0, 0], [torch.zeros(LENGTH, LENGTH, dtype=torch.bool) for _ in range(2)]

    @abstractmethod
    def make(self, source: torch.Generator) -> None:
        """The indexer and its weights."""

    @abstractmethod
    def choose(self, given: list[Tensor], index: PagedIndex) -> Selection:
        """What the indexer says to a step's rows."""

    @abstractmethod
    def key(self, slot: int, block: int) -> Tensor:
        """The definition of a block's key, float64."""

    @abstractmethod
    def score(self, slot: int, row: int, key: Tensor) -> float:
        """The definition of what a row's queries make of it."""

    def step(self, rows: dict[int, int], *, keep: bool, accept: int | None = None) -> None:
        starts = [self.lengths[s] for s in rows]
        positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, rows.values(), strict=True)])
        batch = StepBatch(
            tokens=positions, positions=positions, counts=tuple(rows.values()), slots=torch.tensor(list(rows)),
            lengths=torch.tensor(starts), candidates=torch.zeros(len(rows), dtype=torch.int64), keep_rows=keep,
            block_tables=torch.tensor([[1 + s * TABLE + b for b in range(TABLE)] for s in rows]),
            max_length=max(a + n for a, n in zip(starts, rows.values(), strict=True)),
        )  # fmt: skip
        given = [torch.cat([x[s, self.lengths[s] : self.lengths[s] + n] for s, n in rows.items()]) for x in self.given]
        chosen = [_wide(part) for part in self.choose(given, PagedIndex(batch, BLOCK))]
        masks = torch.cat([part.transpose(1, 2).flatten(2).flatten(0, 1)[:, :LENGTH] for part in chosen])
        for s, part in zip(rows, torch.split(masks, list(rows.values())), strict=True):
            done = rows[s] if accept is None else accept
            self.out[s][self.lengths[s] : self.lengths[s] + done] = part[:done]
            self.lengths[s] += done

    def plain(self, slot: int) -> Tensor:
        """The definition, row by row and block by block."""
        chosen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for t in range(LENGTH):
            complete = (t + 1) // RATIO
            for _, b in sorted((-self.score(slot, t, self.key(slot, b)), b) for b in range(complete))[:TOP]:
                chosen[t, RATIO * b : RATIO * (b + 1)] = True
            chosen[t, complete * RATIO : t + 1] = True
        return chosen


def _wide(part: Tensor) -> Tensor:
    """A mask of as many tiles as the table has."""
    return torch.nn.functional.pad(part, (0, 0, 0, 0, 0, TABLE - part.shape[1]))


class Means(Rig):
    """Keys that are normed and turned means of a block's; queries normed and turned."""

    def make(self, source: torch.Generator) -> None:
        self.q_norm, self.k_norm = 1 + 0.2 * torch.randn(2, WIDTH, generator=source)
        rope = RotaryTable(TURNED, LENGTH + STEP, 10000.0, torch.device("cpu"))
        self.layer = BlockIndexer(HEADS, WIDTH, RATIO, TOP, q_norm=self.q_norm, k_norm=self.k_norm, eps=1e-6, rope=rope)

    def choose(self, given: list[Tensor], index: PagedIndex) -> Selection:
        q, k = given
        return self.layer(q, k, index, self.pool, self.ring, torch.float32)

    def key(self, slot: int, block: int) -> Tensor:
        k = self.given[1][slot].double()[RATIO * block : RATIO * (block + 1)].mean(0)
        return rotated(normed(k, self.k_norm), RATIO * block)

    def score(self, slot: int, row: int, key: Tensor) -> float:
        heads = self.given[0][slot, row].double().view(HEADS, WIDTH)
        return sum(max(0.0, float(rotated(normed(q, self.q_norm), row) @ key)) for q in heads)


class Mixtures(Rig):
    """Keys that are mixtures of a block's keys, one weight a token and dimension; gated heads."""

    kept = 2

    def make(self, source: torch.Generator) -> None:
        self.given += tuple(torch.randn(2, LENGTH, size, generator=source) for size in (WIDTH, HEADS))
        self.norm, self.bias = 1 + 0.2 * torch.randn(WIDTH, generator=source), torch.randn(WIDTH, generator=source)
        self.places = 2 * torch.randn(RATIO, WIDTH, generator=source)
        self.layer = PooledIndexer(
            HEADS, WIDTH, TOP, key_norm=self.norm, key_bias=self.bias, eps=1e-6, places=self.places
        )

    def choose(self, given: list[Tensor], index: PagedIndex) -> Selection:
        q, k, weights, gates = given
        return self.layer(q, k, weights, gates, index, self.pool, self.ring, torch.float32)

    def key(self, slot: int, block: int) -> Tensor:
        _, k, weights, _ = (part[slot].double()[RATIO * block : RATIO * (block + 1)] for part in self.given)
        centred = k - k.mean(1, keepdim=True)
        k = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt() * self.norm.double() + self.bias.double()
        return (torch.softmax(weights + self.places.double(), 0) * k).sum(0)

    def score(self, slot: int, row: int, key: Tensor) -> float:
        heads, gates = self.given[0][slot, row].double().view(HEADS, WIDTH), self.given[3][slot, row]
        return sum(float(g) * max(0.0, float(q @ key)) for g, q in zip(gates, heads, strict=True))


def rotated(x: Tensor, position: int) -> Tensor:
    """One vector, pair by pair."""
    out, half = x.clone(), TURNED // 2
    for j in range(half):
        angle = torch.tensor(position * 10000.0 ** (-2 * j / TURNED), dtype=torch.float64)
        out[j] = x[j] * angle.cos() - x[j + half] * angle.sin()
        out[j + half] = x[j + half] * angle.cos() + x[j] * angle.sin()
    return out


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt() * weight.double()


KINDS = pytest.mark.parametrize("kind", [Means, Mixtures])


@KINDS
@pytest.mark.parametrize("ties", [False, True])
def test_equals_its_definition(kind: type[Rig], ties: bool) -> None:
    rig = kind(ties=ties)
    rig.step({1: LENGTH}, keep=False)
    wanted = rig.plain(1)
    assert torch.equal(rig.out[1], wanted)
    assert (~wanted.diagonal()).any(), "a row that ends a block need not see itself"


@KINDS
@pytest.mark.parametrize("ties", [False, True])
def test_the_same_choice_in_every_kind_of_step(kind: type[Rig], ties: bool) -> None:
    whole = kind(ties=ties)
    whole.step({1: LENGTH}, keep=False)
    chunks, verified = kind(ties=ties), kind(ties=ties)
    for count in (2, 1, 30, 9, 33):
        chunks.step({1: count, 0: count}, keep=False)
    verified.step({1: 13}, keep=False)
    for _ in range(58):
        verified.step({1: 4, 0: 4}, keep=True, accept=1)
    for _ in range(2):
        verified.step({1: 2}, keep=True)
    assert torch.equal(chunks.out[1], whole.out[1])
    assert torch.equal(verified.out[1], whole.out[1])


@KINDS
def test_blocks_that_are_no_whole_number_of_index_blocks_are_refused(kind: type[Rig]) -> None:
    rig = kind()
    rig.pool = rig.pool[:, :, :6]
    with pytest.raises(ConfigError, match="block_tokens"):
        rig.step({0: 4}, keep=False)
