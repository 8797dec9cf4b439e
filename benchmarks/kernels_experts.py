"""Router and routed experts at GLM-4.7's shapes on this GPU: ``python benchmarks/kernels_experts.py [--json FILE]``.

160 experts and a shared one, top 8, hidden 5120, inner 1536, NVFP4. A figure is the median of replays of a CUDA graph
of launches in a row, over layers and routings that no cache holds. The floor of a decode kernel is the bytes of the
experts that were chosen over the card's measured read bandwidth; that of a prefill product its operations (those of
real picks, not of padded tiles) over the tensor cores' measured bfloat16 speed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import click
import torch
import triton
from msgspec import Struct, structs
from torch import Tensor

from dgpp_core.ops.kernels import experts as experts_module
from dgpp_core.ops.kernels import experts_prefill
from dgpp_core.ops.kernels.experts import CudaExperts
from dgpp_core.ops.kernels.experts_combine import combine_norm
from dgpp_core.ops.kernels.experts_decode import decode_down, decode_gate_up
from dgpp_core.ops.kernels.experts_grouped import grouped_experts
from dgpp_core.ops.kernels.experts_order import PickTables, order_picks
from dgpp_core.ops.kernels.router import CudaRouter
from dgpp_core.ops.router import Routing
from dgpp_core.testing.compile import compile_all
from dgpp_core.testing.graph_time import timed

READ = 4.38e12
"""Bytes a second that an H200 reads (measured)."""
MULTIPLY = 790e12
"""bfloat16 operations a second of its tensor cores (measured)."""
EXPERTS, TOP_K, HIDDEN, INNER = 160, 8, 5120, 1536
EXPERT_BYTES = 3 * HIDDEN * INNER * 9 // 16
LAYERS, ROUTINGS = 3, 8
DEVICE = torch.device("cuda")
MODULES = [
    f"dgpp_core.ops.kernels.{name}"
    for name in ("router", "experts", "experts_combine", "experts_order", "experts_prefill")
]
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"FENCE": False}, {"STAGES": 6}, {"W": 4, "STAGES": 4, "num_warps": 4})
"""Other cuts of the grouped products, for ``--variants``; the bits are the same."""


class Result(Struct, frozen=True):
    """Microseconds of one launch or one chain; ``floor`` and ``share`` as in the module's text, 0 without a floor."""

    name: str
    m: int
    microseconds: float
    floor: float = 0.0
    share: float = 0.0


class Layer(Struct, frozen=True, eq=False):
    """A layer's weights."""

    experts: CudaExperts
    router: CudaRouter
    norm: Tensor


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, device=DEVICE, dtype=torch.int32)


def make_layer() -> Layer:
    """Random codes, moderate scales."""
    tensors: dict[str, Tensor] = {}
    for which, rows, columns in (("gate_up", 2 * INNER, HIDDEN), ("down", HIDDEN, INNER)):
        tiles = (EXPERTS + 1) * rows // 16
        scales = torch.randint(72, 88, (tiles, columns // 128, 32, 4), device=DEVICE, dtype=torch.uint8)
        tensors[f"{which}_codes"] = words(tiles, columns // 64, 32, 4)
        tensors[f"{which}_scales"] = scales.view(torch.int32).squeeze(-1)
        tensors[f"{which}_multipliers"] = torch.full((tiles,), 256 * 0.2 / columns**0.5, device=DEVICE)
    weight = (torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 0.02).bfloat16()
    router = CudaRouter(weight, torch.zeros(EXPERTS, device=DEVICE), TOP_K, scale=2.5)
    return Layer(
        CudaExperts.from_prepared(tensors, experts=EXPERTS), router, torch.ones(HIDDEN, device=DEVICE).bfloat16()
    )


def random_routing(m: int) -> Routing:
    ids = torch.rand(m, EXPERTS, device=DEVICE).topk(TOP_K).indices.sort(-1).values.int().contiguous()
    return Routing(ids, torch.full((m, TOP_K), 0.3, device=DEVICE))


def with_floor(name: str, m: int, spent: float, floor: float) -> Result:
    return Result(name, m, spent, floor, floor / spent)


def decode(layers: list[Layer], m: int, variants: bool) -> list[Result]:
    """Each kernel by itself, then the layer's chain as the model runs it."""
    x, residual = torch.randn(m, HIDDEN, device=DEVICE).bfloat16(), torch.randn(m, HIDDEN, device=DEVICE)
    routings = [random_routing(m) for _ in range(ROUTINGS)]
    chosen = statistics.mean(len(set(r.ids.flatten().tolist())) + 1 for r in routings)
    total = m * TOP_K + m
    h = torch.randn(total, INNER, device=DEVICE).bfloat16()
    y = torch.empty(total, HIDDEN, device=DEVICE)
    logits = layers[0].router.logits(x)
    options = experts_module._decode_options(TOP_K, EXPERTS, True, m, True)
    programs = m * TOP_K + 1

    def gate_up(i: int, fetch: bool = True) -> None:
        weights, ids = layers[i % LAYERS].experts._weights("gate_up"), routings[i % ROUTINGS].ids
        decode_gate_up[(INNER // 16, programs)](
            *weights, x.view(torch.int32), h, ids, m, m * TOP_K,
            **experts_module._gate_up_options(HIDDEN, INNER), **options, FETCH=fetch,
        )  # fmt: skip

    def down(i: int) -> None:
        weights, ids = layers[i % LAYERS].experts._weights("down"), routings[i % ROUTINGS].ids
        decode_down[(HIDDEN // 32, programs)](
            *weights, h.view(torch.int32), y, ids, m, m * TOP_K,
            **experts_module._down_options(HIDDEN, INNER), **options,
        )  # fmt: skip

    def whole(i: int, fetch: bool = True) -> None:
        layer = layers[i % LAYERS]
        layer.router.choose(layer.router.logits(x), spare.ids, spare.weights)
        gate_up(i, fetch)
        down(i)
        norm_only(residual, y, routings[i % ROUTINGS], layer)

    spare = random_routing(m)
    size = chosen * EXPERT_BYTES / READ * 1e6
    floor = size + EXPERTS * HIDDEN * 2 / READ * 1e6
    plain = timed(lambda i: whole(i, fetch=False), 24) if variants else 0.0
    return [
        Result("router logits", m, timed(lambda i: layers[i % LAYERS].router.logits(x), 24)),
        Result("choice", m, timed(lambda i: layers[0].router.choose(logits, spare.ids, spare.weights), 24)),
        with_floor("gate+up", m, timed(gate_up, 24), size * 2 / 3),
        with_floor("down", m, timed(down, 24), size / 3),
        Result("sum and norm", m, timed(lambda i: norm_only(residual, y, routings[0], layers[0]), 24)),
        with_floor("layer", m, timed(whole, 24), floor),
        *([with_floor("layer, nothing fetched ahead", m, plain, floor)] if variants else []),
    ]


def norm_only(residual: Tensor, y: Tensor, routing: Routing, layer: Layer) -> Tensor:
    return combine_norm(residual, y, routing, layer.norm, 1e-5, torch.bfloat16)


def grouped(
    layer: Layer, which: str, x: Tensor, out: Tensor, tables: PickTables, m: int, tile: int, changes: dict[str, Any]
) -> None:
    """One grouped product with some of its compile-time arguments changed."""
    gated = which == "gate_up"
    shape = (2 * INNER, HIDDEN) if gated else (HIDDEN, INNER)
    meta = experts_prefill.grouped_meta(shape, TOP_K, gated, tile, True) | changes
    grid = (shape[0] // (32 * meta["W"]), tables.tiles.shape[0])
    grouped_experts[grid](*layer.experts._weights(which), x, out, tables.order, tables.tiles, m * TOP_K, **meta)


def prefill(layers: list[Layer], m: int, variants: bool) -> list[Result]:
    """Each step by itself, then all of the experts' part."""
    x, residual = torch.randn(m, HIDDEN, device=DEVICE).bfloat16(), torch.randn(m, HIDDEN, device=DEVICE)
    routing = random_routing(m)
    total = m * TOP_K + m
    h = torch.randn(total, INNER, device=DEVICE).bfloat16()
    y = torch.empty(total, HIDDEN, device=DEVICE)
    tile = experts_prefill.tile_size(m * TOP_K, EXPERTS, True)
    tables = order_picks(routing.ids, EXPERTS, True, tile)
    router = layers[0].router
    up_floor = 2 * total * 2 * INNER * HIDDEN / MULTIPLY * 1e6
    results = [
        Result("router", m, timed(lambda i: router(x, decode=False), 2, 5)),
        Result("order of picks", m, timed(lambda i: order_picks(routing.ids, EXPERTS, True, tile), 2, 5)),
        Result("order of k", m, timed(lambda i: experts_prefill.in_fragment_order(x), 2, 5)),
        Result("sum and norm", m, timed(lambda i: norm_only(residual, y, routing, layers[0]), 2, 5)),
    ]
    for changes in VARIANTS if variants else VARIANTS[:1]:
        note = " ".join(f"{key} {value}" for key, value in changes.items() if key != "num_warps")
        for which, source, out, floor in (("gate_up", x, h, up_floor), ("down", h, y, up_floor / 2)):

            def launch(i: int, which: str = which, source: Tensor = source, out: Tensor = out) -> None:
                grouped(layers[i % LAYERS], which, source, out, tables, m, tile, changes)  # noqa: B023

            try:
                results.append(with_floor(f"{which} {note}".strip(), m, timed(launch, 3, 5), floor))
            except Exception as error:  # a variant may not fit this card
                print(f"{which} {note}: {type(error).__name__}: {str(error)[:200]}")
    spent = timed(lambda i: layers[i % LAYERS].experts(x, routing, decode=False), 3, 5)
    return [*results, with_floor("experts", m, spent, up_floor * 1.5)]


def report(results: list[Result]) -> None:
    """A table of every result."""
    print(f"{'kernel':40} {'rows':>5} {'µs':>9} {'floor':>8} {'share':>6}")
    for r in results:
        floor = f"{r.floor:8.1f} {r.share:6.0%}" if r.floor else ""
        print(f"{r.name:40} {r.m:5} {r.microseconds:9.1f} {floor}")


@click.command()
@click.option("--rows", default="1,4,8,16", help="Row counts of decode kernels; empty for none.")
@click.option("--prefill-rows", default="2048,8192", help="Row counts of prefill products; empty for none.")
@click.option("--variants", is_flag=True, help="Also time other cuts of the products.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the results here.")
def main(rows: str, prefill_rows: str, variants: bool, path: Path | None) -> None:
    """Measure router and experts on this GPU."""
    compile_all(MODULES, [10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]])
    layers = [make_layer() for _ in range(LAYERS)]
    results = [result for m in rows.split(",") if m for result in decode(layers, int(m), variants)]
    results += [result for m in prefill_rows.split(",") if m for result in prefill(layers, int(m), variants)]
    report(results)
    if path:
        versions = {"torch": torch.__version__, "triton": triton.__version__}
        found = [structs.asdict(result) for result in results]
        path.write_text(json.dumps({"card": torch.cuda.get_device_name(), "versions": versions, "results": found}))


if __name__ == "__main__":
    main()
