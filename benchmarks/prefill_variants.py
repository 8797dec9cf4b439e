"""Cuts of the prefill products against each other on this GPU: ``python benchmarks/prefill_variants.py [--only WORD]``.

Every cut gives the same bits as the served one, or is marked. Compiled in parallel first, then timed as in
`kernels_dense.py`.
"""
# ruff: noqa: N803

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import click
import torch
import triton
import triton.language as tl
from kernels_dense import CASES, DEVICE, MULTIPLY, Case, copies
from torch import Tensor

from dgpp_core.ops.kernels import prefill_broad
from dgpp_core.ops.kernels.dense import CudaLinear
from dgpp_core.ops.kernels.plan import prefill_meta
from dgpp_core.ops.kernels.prefill_dense import prefill_product
from dgpp_core.ops.kernels.prepare import fields_of
from dgpp_core.testing.compile import compile_for
from dgpp_core.testing.graph_time import timed

ROWS = 2048
CUTS: dict[str, list[dict[str, int]]] = {
    "bf16": [
        {},
        {"DEPTH": 128, "STAGES": 2},
        {"DEPTH": 64, "STAGES": 3},
    ],
    "nvfp4": [
        {},
        {"COLUMNS": 128, "STAGES": 2},
        {"COLUMNS": 128, "STAGES": 3},
        {"COLUMNS": 128, "STAGES": 2, "W": 16, "num_warps": 16},
        {"COLUMNS": 128, "STAGES": 2, "W": 4, "num_warps": 4},
    ],
    "fp8": [{}, {"COLUMNS": 128, "STAGES": 3}, {"COLUMNS": 64, "STAGES": 3}],
}
TILES = [(256, 128, 64, 3, 8), (256, 128, 64, 4, 8)]


@triton.jit(do_not_specialize=["M"])
def tiled(
    weights,
    x,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`prefill_product` of BF16 weights by ``tl.dot``, both operands through shared memory; N a multiple of COLUMNS."""
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    row = n // 16 * (16 * K) + (n // 8 % 2) * 512 + n % 8 * 32
    column = k // 64 * 1024 + k // 8 % 2 * 256 + k // 16 % 4 * 8 + k % 8
    ws = weights + row[None, :] + column[:, None]
    xs = x + tl.minimum(m, M - 1)[:, None] * K + k[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for d in tl.range(0, K // DEPTH, num_stages=STAGES):
        total = tl.dot(tl.load(xs + d * DEPTH), tl.load(ws + d * (16 * DEPTH)), total)
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=(m < M)[:, None])


def tile_meta(case: Case, cut: tuple[int, ...]) -> dict[str, Any]:
    rows, columns, depth, stages, warps = cut
    return {
        "N": case.rows,
        "K": case.columns,
        "ROWS": rows,
        "COLUMNS": columns,
        "DEPTH": depth,
        "STAGES": stages,
        "num_warps": warps,
    }


def compile_one(form: str, meta: dict[str, Any]) -> str:
    """Compile one cut where no GPU is needed; the failure, if any."""
    bf16 = torch.bfloat16
    try:
        if form in ("tiled", "broad"):
            compile_for(90, tiled if form == "tiled" else prefill_broad.prefill_broad, bf16, bf16, bf16, 5, **meta)
        else:
            weights, scales = bf16 if form == "bf16" else torch.int32, torch.float32 if form == "fp8" else torch.int32
            compile_for(90, prefill_product, weights, scales, torch.float32, bf16, bf16, 5, **meta)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[-300:]
    return ""


def cuts_of(case: Case) -> list[tuple[str, dict[str, Any]]]:
    """Name of the kernel and compile-time arguments of every cut of a product."""
    base = prefill_meta(case.form, case.rows, case.columns, ROWS, 90)  # type: ignore[arg-type]
    found = [(case.form, {**base, **cut}) for cut in CUTS[case.form]]
    if case.form == "bf16":
        found += [("tiled", tile_meta(case, cut)) for cut in TILES]
        found += [("broad", {"N": case.rows, "K": case.columns, "num_warps": 8})]
    return found


def launcher(kernel: str, meta: dict[str, Any], x: Tensor, out: Tensor) -> Callable[[CudaLinear], None]:
    """A function that launches one cut."""

    def launch(product: CudaLinear) -> None:
        weights, scales, multipliers = (*fields_of(product._packed), *fields_of(product._packed)[:1] * 2)[:3]
        if kernel in ("bf16", "tiled", "broad"):
            weights = weights.view(torch.bfloat16)
        if kernel == "tiled":
            grid = (-(-len(x) // meta["ROWS"]), meta["N"] // meta["COLUMNS"])
            tiled[grid](weights, x, out, len(x), **meta)
            return
        if kernel == "broad":
            grid = (-(-len(x) // prefill_broad.COLUMNS_), -(-meta["N"] // prefill_broad.ROWS))
            prefill_broad.prefill_broad[grid](weights, x, out, len(x), **meta)
            return
        grid = (-(-len(x) // meta["COLUMNS"]), -(-meta["N"] // (16 * meta["W"])))
        prefill_product[grid](weights, scales, multipliers, x, out, len(x), **meta)

    return launch


def measure(case: Case, failures: dict[int, str]) -> None:
    """Time every cut of a product that compiled, and compare its result with the first."""
    products, _ = copies(case)
    x = torch.randn(ROWS, case.columns, device=DEVICE).bfloat16()
    floor, first = 2 * ROWS * case.rows * case.columns / MULTIPLY * 1e6, None
    for i, (kernel, meta) in enumerate(cuts_of(case)):
        kept = {k: v for k, v in meta.items() if k not in ("N", "K", "FORM", "WGMMA", "num_warps")}
        label = f"{case.name:8} {kernel:6} {kept}"
        if failures[i]:
            print(f"{label} does not compile: {failures[i]}")
            continue
        out = torch.full((ROWS, case.rows), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        launch = launcher(kernel, meta, x, out)
        try:
            spent = timed(lambda i, launch=launch: launch(products[i % len(products)]), 4, 5)
        except Exception as error:
            print(f"{label} failed: {str(error)[-200:]}")
            continue
        launch(products[0])
        first = out.clone() if first is None else first
        same = "same bits" if torch.equal(out, first) else f"differs by {float((out - first).abs().max()):.1e}"
        print(f"{label} {spent:8.1f} µs {floor / spent:5.0%} {same}", flush=True)


@click.command()
@click.option("--only", default="", help="Products whose name or form contains this.")
def main(only: str) -> None:
    """Time every cut of the prefill products of 2,048 rows."""
    cases = [c for c in CASES if c.prefill and not c.gated and c.form in CUTS and only in f"{c.name} {c.form}"]
    cases += [Case("gate+up", "nvfp4", 24576, 5120)] if only in "gate+up nvfp4" else []
    jobs = [(i, j, *cut) for i, case in enumerate(cases) for j, cut in enumerate(cuts_of(case))]
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        done = list(pool.map(compile_one, [job[2] for job in jobs], [job[3] for job in jobs]))
    for i, case in enumerate(cases):
        measure(case, {job[1]: failure for job, failure in zip(jobs, done, strict=True) if job[0] == i})


if __name__ == "__main__":
    main()
