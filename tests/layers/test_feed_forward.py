"""Feed-forwards and mixtures around the residual stream against their equations, whole and divided among ranks."""

import math
from collections.abc import Mapping

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.api import Bus, Shard
from dgpp_core.bus.loopback import LoopbackWorld
from dgpp_core.bus.solo import SoloBus
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.layers.feed_forward import FeedForward, Mixture
from dgpp_core.layers.stream import Stream
from dgpp_core.ops.experts import Experts
from dgpp_core.ops.router import Router

ROWS, HIDDEN, INNER, EXPERTS, TOP_K, LIMIT, EPS = 9, 32, 24, 6, 2, 1.5, 1e-5


class Held(msgspec.Struct, frozen=True):
    """Weights in memory; implements what a feed-forward takes of `dgpp_core.api.Weights`."""

    tensors: Mapping[str, Tensor]

    def take(self, target: str) -> Tensor:
        return self.tensors[target]

    def matrix(self, target: str) -> Matrix:
        return DenseMatrix(self.tensors[target].flatten(0, -2))


@pytest.fixture
def whole() -> dict[str, Tensor]:
    """Entries of gate, up and down: the routed experts, then the shared one."""
    source = torch.Generator().manual_seed(12)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source) / math.sqrt(shape[-1])

    entries = EXPERTS + 1
    return {
        "gate": 3 * noise(entries, INNER, HIDDEN), "up": 3 * noise(entries, INNER, HIDDEN),
        "down": noise(entries, HIDDEN, INNER), "router": noise(EXPERTS, HIDDEN), "norm": 1 + noise(HIDDEN),
        "x": torch.randn(ROWS, HIDDEN, generator=source), "residual": torch.randn(ROWS, HIDDEN, generator=source),
    }  # fmt: skip


def fed(whole: Mapping[str, Tensor], entry: int, x: Tensor) -> Tensor:
    gate, up, down = (whole[name][entry].double() for name in ("gate", "up", "down"))
    inner: Tensor = F.silu((gate @ x).clamp(max=LIMIT)) * (up @ x).clamp(-LIMIT, LIMIT)
    return torch.einsum("hi,i->h", down, inner)


def mixed(whole: Mapping[str, Tensor], x: Tensor, shared: bool) -> Tensor:
    scores = torch.sigmoid(whole["router"].double() @ x)
    chosen = scores.topk(TOP_K).indices.tolist()
    total = torch.stack([scores[e] / scores[chosen].sum() * fed(whole, e, x) for e in chosen]).sum(0)
    return total + fed(whole, EXPERTS, x) if shared else total


def shard(whole: Mapping[str, Tensor], bus: Bus) -> Shard:
    """A rank's slice of every entry's inner dimension; entries apart and stacked."""
    cut = slice(bus.rank * INNER // bus.world, (bus.rank + 1) * INNER // bus.world)
    gate_up = torch.cat((whole["gate"][:, cut], whole["up"][:, cut]), dim=1)
    down = whole["down"][..., cut].contiguous()
    held = {
        "router": whole["router"], "own.gate_up": gate_up[-1], "own.down": down[-1],
        "routed.gate_up": gate_up[:-1], "routed.down": down[:-1], "all.gate_up": gate_up, "all.down": down,
    }  # fmt: skip
    weights = Held(held)
    return Shard(device=torch.device("cpu"), dtype=torch.float32, weights=weights, bus=bus)  # type: ignore[arg-type]


def build(kind: str, at: Shard) -> FeedForward | Mixture:
    own = FeedForward(at, "own", limit=LIMIT)
    if kind == "feed-forward":
        return own
    stacked = kind == "shared in the stack"
    experts = Experts.load(at, "all" if stacked else "routed", experts=EXPERTS, shared=stacked, limit=LIMIT)
    router = Router(at.weights.matrix("router"), torch.zeros(EXPERTS), TOP_K)
    return Mixture(at, router, experts, own if kind == "shared apart" else None)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["feed-forward", "routed alone", "shared in the stack", "shared apart"])
def test_equal_their_equations_on_any_number_of_ranks(whole: dict[str, Tensor], kind: str, ranks: int) -> None:
    x, residual, norm = whole["x"].double(), whole["residual"].double(), whole["norm"].double()
    shared = kind != "routed alone"
    rows = [fed(whole, EXPERTS, row) if kind == "feed-forward" else mixed(whole, row, shared) for row in x]
    added = torch.stack(rows)
    normed = F.rms_norm(residual + added, (HIDDEN,), norm, EPS)

    def found(bus: Bus) -> tuple[Tensor, Tensor, Tensor]:
        made, stream = build(kind, shard(whole, bus)), Stream(whole["residual"].clone(), EPS, torch.float32)
        return made.output(whole["x"], True), made(whole["x"], stream, whole["norm"], True), stream.residual

    every = LoopbackWorld(ranks).run(found) if ranks > 1 else [found(SoloBus())]
    for each in every:
        for got, wanted in zip(each, (added, normed, residual + added), strict=True):
            assert (got - wanted).abs().max() < 2e-6 * wanted.abs().max()
        assert all(torch.equal(a, b) for a, b in zip(each, every[0], strict=True)), "ranks have the same bits"
