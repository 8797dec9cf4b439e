"""Grouped-query attention with bias, head norms and partial rotation against the equations in float64."""

import math

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.layers.gqa import GroupedQueryAttention
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.ops.rope import RotaryTable

HEADS, KV_HEADS, WIDTH, TURNED, BLOCK, EPS, THETA = 6, 2, 32, 16, 16, 1e-5, 1000.0


class Rig:
    """One layer, one request of 40 tokens in blocks 1 to 3."""

    def __init__(self) -> None:
        torch.manual_seed(4)
        self.qkv = torch.randn(40, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.bias = torch.randn((HEADS + 2 * KV_HEADS) * WIDTH)
        self.q_norm, self.k_norm = torch.rand(2, WIDTH) + 0.5
        self.k_pool, self.v_pool = torch.zeros(2, 4, KV_HEADS, BLOCK, WIDTH)
        self.rope = RotaryTable(TURNED, 64, THETA, torch.device("cpu"))

    def layer(self) -> GroupedQueryAttention:
        return GroupedQueryAttention(
            HEADS, KV_HEADS, WIDTH, WIDTH**-0.5, bias=self.bias, q_norm=self.q_norm, k_norm=self.k_norm, eps=EPS,
            rope=self.rope,
        )  # fmt: skip

    def run(self, counts: list[int], keep: bool) -> Tensor:
        """The layer over all rows, some a step."""
        outs, start = [], 0
        for count in counts:
            positions = torch.arange(start, start + count)
            batch = StepBatch(
                tokens=positions, positions=positions, counts=(count,), slots=torch.tensor([0]),
                lengths=torch.tensor([start]), block_tables=torch.tensor([[1, 2, 3]]), candidates=torch.tensor([0]),
                keep_rows=keep, max_length=start + count,
            )  # fmt: skip
            index = PagedIndex(batch, BLOCK)
            outs.append(self.layer()(self.qkv[positions], index, self.k_pool, self.v_pool, torch.float32))
            start += count
        return torch.cat(outs)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / math.sqrt((x @ x).item() / WIDTH + EPS) * weight.double()


def turned(x: Tensor, position: int) -> Tensor:
    """Pairs (i, i + 8) of the first 16 dimensions as complex numbers; the others stay."""
    out, half = x.clone(), TURNED // 2
    for i in range(half):
        angle = position * THETA ** (-2 * i / TURNED)
        pair = complex(x[i], x[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = pair.real, pair.imag
    return out


def by_hand(rig: Rig, row: int) -> Tensor:
    rows = (rig.qkv.double() + rig.bias.double()).view(40, -1, WIDTH)
    outs = []
    for head in range(HEADS):
        q = turned(normed(rows[row, head], rig.q_norm), row)
        kv = head // (HEADS // KV_HEADS)
        keys = [turned(normed(rows[p, HEADS + kv], rig.k_norm), p) for p in range(row + 1)]
        values = rows[: row + 1, HEADS + KV_HEADS + kv]
        scores = torch.stack([q @ k for k in keys]) * WIDTH**-0.5
        outs.append(torch.softmax(scores, 0) @ values)
    return torch.cat(outs)


def test_equals_the_equations() -> None:
    rig = Rig()
    out = rig.run([40], keep=False)
    for row in (0, 1, 15, 16, 39):
        assert torch.allclose(out[row].double(), by_hand(rig, row), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [[1] * 40, [7, 9, 16, 8], [4] * 10])
def test_every_way_through_gives_the_same_bits(counts: list[int]) -> None:
    whole = Rig().run([40], keep=False)
    assert torch.equal(Rig().run(counts, keep=False), whole)
    assert torch.equal(Rig().run(counts, keep=True), whole)


def test_without_bias_norms_and_rotation_rows_are_stored_as_they_come() -> None:
    rig = Rig()
    rig.layer = lambda: GroupedQueryAttention(HEADS, KV_HEADS, WIDTH, WIDTH**-0.5)  # type: ignore[method-assign]
    rig.run([40], keep=False)
    keys = rig.qkv.view(40, -1, WIDTH)[:, HEADS : HEADS + KV_HEADS]
    assert torch.equal(rig.k_pool[1:].transpose(1, 2).flatten(0, 1)[:40], keys)
