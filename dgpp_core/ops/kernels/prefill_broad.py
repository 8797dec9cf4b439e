"""Prefill product of a BF16 matrix on `wgmma` in tiles of 192 rows of the weight and 256 rows of activations.

Tiles of 128 by 256 are bound by what an SM reads from L2 (5.1 TB/s in all on an H200); these read 22 % less for a
multiplication. The 192 rows are two accumulators: 128 rows, 64 a warp group, and 64 rows, 128 columns a warp group. The
order of K, and so the bits, are those of `prefill_product`.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.prefill_dense import store_rows

ROWS, COLUMNS_, DEPTH_, STAGES_ = 192, 256, 64, 3
LEAST_ROWS, LEAST_M = 2048, 512
"""Below, smaller tiles spread better over the SMs."""
HEIGHT = gl.constexpr(ROWS)
COLUMNS = gl.constexpr(COLUMNS_)
DEPTH = gl.constexpr(DEPTH_)
STAGES = gl.constexpr(STAGES_)


@gluon.constexpr_function
def tall_layout():
    """``[128, 64]`` weights in the lanes that copy them."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, 64])


@gluon.constexpr_function
def short_layout():
    """``[64, 64]``: the same with two warps a row tile."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [0, 8]], [], [64, 64])


@gluon.jit
def weight_pointers(base, tile, K: gl.constexpr, TILES: gl.constexpr, ROWS: gl.constexpr, L: gl.constexpr):
    """Pointers to the first slot of ROWS rows from row tile ``tile`` on; past the last tile it is read again."""
    n = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    k = gl.arange(0, DEPTH, gl.SliceLayout(0, L))
    row = gl.minimum(tile + n // 16, TILES - 1).to(gl.int64) * (16 * K) + n // 8 % 2 * 512 + n % 8 * 32
    return base + row[:, None] + (k // 8 % 2 * 256 + k // 16 * 8 + k % 8)[None, :]


@gluon.jit
def copy_slot(xb, tall, short, xs, ts, ss, slot, stage):
    """Ask for one slot of activations and weights."""
    async_copy.async_copy_global_to_shared(xb.index(stage), xs + slot * DEPTH)
    async_copy.async_copy_global_to_shared(tall.index(stage), ts + slot * (16 * DEPTH))
    async_copy.async_copy_global_to_shared(short.index(stage), ss + slot * (16 * DEPTH))
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["M"])
def prefill_broad(weights, x, out, M, N: gl.constexpr, K: gl.constexpr):
    """``out[m, n]`` = x[m] · weights[n], rounded once to the dtype of ``out``.

    Args:
        weights: bfloat16 of `pack_bf16`; x: bfloat16 ``[M, K]``.
    """
    column, program = gl.program_id(0) * COLUMNS, gl.program_id(1)
    SLOTS: gl.constexpr = K // DEPTH
    TALL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 256, 16])
    SHORT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 128, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    xb = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, DEPTH], SHARED)
    tall = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 128, DEPTH], SHARED)
    short = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, DEPTH], SHARED)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    m = gl.minimum(column + gl.arange(0, COLUMNS, gl.SliceLayout(1, COPY)), M - 1)
    xs = x + (m[:, None] * K + gl.arange(0, DEPTH, gl.SliceLayout(0, COPY))[None, :])
    ts = weight_pointers(weights, program * 12, K, N // 16, 128, tall_layout())
    ss = weight_pointers(weights, program * 12 + 8, K, N // 16, 64, short_layout())
    for s in gl.static_range(STAGES - 1):
        copy_slot(xb, tall, short, xs, ts, ss, min(s, SLOTS - 1), s)
    upper = warpgroup_mma_init(gl.zeros([128, COLUMNS], gl.float32, TALL))
    lower = warpgroup_mma_init(gl.zeros([64, COLUMNS], gl.float32, SHORT))
    # As in `prefill_product`: a bound that the compiler cannot know.
    for d in range(SLOTS + gl.minimum(M, 0)):
        async_copy.wait_group(STAGES - 2)
        stage = d % STAGES
        fence_async_shared()
        upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
        b = xb.index(stage).permute((1, 0))
        upper = warpgroup_mma(tall.index(stage), b, upper, is_async=True)
        lower = warpgroup_mma(short.index(stage), b, lower, is_async=True)
        ahead = d + STAGES - 1
        copy_slot(xb, tall, short, xs, ts, ss, gl.minimum(ahead, SLOTS - 1), ahead % STAGES)
    async_copy.wait_group(0)
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    store_rows(out, upper, program * HEIGHT, column, M, N, 8, 128, COLUMNS)
    store_rows(out, lower, program * HEIGHT + 128, column, M, N, 8, 64, COLUMNS)


def fits(form: str, rows: int, m: int, capability: int, gated: bool) -> bool:
    """Whether these tiles serve the product of ``m`` rows of activations with a weight of ``rows`` rows."""
    return capability == 90 and form == "bf16" and not gated and rows >= LEAST_ROWS and m >= LEAST_M


def compile_cases() -> list[CompileCase]:
    """The large BF16 products of GLM-4.7, and one of few slots."""
    arguments = (torch.bfloat16, torch.bfloat16, torch.bfloat16, 5)
    return [
        CompileCase(f"prefill_broad {n}x{k}", prefill_broad, arguments, {"N": n, "K": k, "num_warps": 8}, (90,))
        for n, k in ((14336, 5120), (5120, 12288), (2048, 512))
    ]
