"""Products of any shape and the small steps after a product, in plain Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.stored import stored_cases, weight_tile


@triton.jit(do_not_specialize=["M"])
def plain_product(
    codes, scales, multipliers, x, out, M, N, K,
    KIND: tl.constexpr, SN: tl.constexpr, SK: tl.constexpr, SEGMENT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out[m, n]`` = x[m] · weights[n] in float32, k in ascending order whatever the number of rows.

    Args:
        codes, scales, multipliers, KIND, SN, SK, SEGMENT: the weight ``[N, K]``, a
            `dgpp_core.ops.kernels.stored.StoredWeight`.
        x: ``[M, K]``, out: ``[M, N]``, rounded once to its dtype.
        PRECISION: ``ieee`` is exact float32.
    """
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, DEPTH):
        inside = start + k < K
        row_mask, weight_mask = (m < M)[:, None] & inside[None, :], (n < N)[None, :] & inside[:, None]
        a = tl.load(x + m.to(tl.int64)[:, None] * K + (start + k)[None, :], mask=row_mask, other=0.0).to(tl.float32)
        b = weight_tile(
            codes, scales, n.to(tl.int64)[None, :], (start + k)[:, None], weight_mask, K, KIND, SN, SK
        )  # fmt: skip
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if SEGMENT > 0:
        total = total * tl.load(multipliers + n // SEGMENT, mask=n < N, other=0.0)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["SIZE"])
def fold(parts, out, SIZE, SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``out`` = parts[0] + parts[1] + ... of float32 ``[SPLITS, SIZE]``, rounded once to the dtype of ``out``."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(SPLITS):
        total += tl.load(parts + s * SIZE + i, mask=i < SIZE, other=0.0)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def gate(wide, out, WIDTH, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``silu(gate) up`` of float32 rows ``[M, 2 WIDTH]`` (gate, then up), rounded once to the dtype of ``out``."""
    m = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    g = tl.load(wide + m * (2 * WIDTH) + i, mask=i < WIDTH, other=0.0)
    u = tl.load(wide + m * (2 * WIDTH) + WIDTH + i, mask=i < WIDTH, other=0.0)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + m * WIDTH + i, y.to(out.dtype.element_ty), mask=i < WIDTH)


PRODUCT_META: dict[str, Any] = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "PRECISION": "ieee", "num_warps": 4}
SMALL_META: dict[str, Any] = {"BLOCK": 1024, "PDL": True, "num_warps": 4, "launch_pdl": True}


def compile_cases() -> list[CompileCase]:
    """One of each kind; shapes are run-time numbers here."""
    rows = (torch.float32, torch.bfloat16, torch.float32, 5, 100, 256)
    return [
        *(
            CompileCase(f"plain_product {name}", plain_product, (*dtypes, *rows), meta | PRODUCT_META)
            for name, dtypes, meta in stored_cases()
        ),
        *(
            CompileCase(f"fold {s} splits", fold, (torch.float32, torch.bfloat16, 5120), {"SPLITS": s, **SMALL_META})
            for s in (2, 3, 4)
        ),
        CompileCase("gate", gate, (torch.float32, torch.bfloat16, 12288), SMALL_META),
    ]
