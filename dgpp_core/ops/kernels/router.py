"""Router on a GPU: fp32-accurate logits, scores, the chosen experts in ascending order and their weights.

A bfloat16 weight is multiplied on tensor cores: products of two bf16 are exact, sums are fp32, K is cut into a fixed
number of parts that `choose_experts` adds in order. Any other weight goes through `plain_logits`: fp32 products, one
program a row. Both keep a row's bits independent of the other rows, of their number and of ``decode``.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dgpp_core.api.errors import EngineError
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.fragments import bf16_pairs, first_slots, log2, pdl_launch, pdl_wait
from dgpp_core.ops.kernels.router_choice import choose_experts, plain_logits
from dgpp_core.ops.router import Routing, Score

SLOT = 64
"""k of one load in `router_partials`."""
WARPS = 2
DECODE_COLUMNS, PREFILL_COLUMNS = 8, 32
"""Rows of activations a program: the bits are the same, more share the weight's fragments."""
DECODE_ROWS = 64
SCORES: tuple[Score, ...] = ("sigmoid", "softmax", "sqrt_softplus")


@gluon.constexpr_function
def router_weight_layout():
    """``[32 rows, 32 words]`` of a row-major weight: lane q owns 4 contiguous words of each 32 k, lane / 4 the row."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0]], [], [32, 32])


@gluon.constexpr_function
def router_activation_layout(NT):
    """``[NT, 32 words]``: the same split of k, lane / 4 is the column, both warps hold all of it."""
    registers = [[0, 1], [0, 2], [0, 16]] + [[8 << b, 0] for b in range(log2(NT // 8))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0]], [], [NT, 32])


@gluon.constexpr_function
def router_product_layout():
    """Accumulator ``[32, NT]`` of two warps."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[2, 1], instr_shape=[16, 8])


@gluon.jit
def router_slot(acc, w, x, NT: gl.constexpr):
    """``acc`` plus 64 k: weight words ``[32, 32]``, activation words ``[NT, 32]``; k runs (chunk, j, h, q, i)."""
    L: gl.constexpr = router_product_layout()
    a = bf16_pairs(w.reshape([32, 2, 4, 2, 2])).permute([0, 1, 3, 4, 2, 5]).reshape([32, 64])
    b = bf16_pairs(x.reshape([NT, 2, 4, 2, 2])).permute([1, 3, 4, 2, 5, 0]).reshape([64, NT])
    a = gl.convert_layout(a, gl.DotOperandLayout(0, L, 2), assert_trivial=True)
    b = gl.convert_layout(b, gl.DotOperandLayout(1, L, 2), assert_trivial=True)
    return mma_v2(a, b, acc)


@gluon.jit(do_not_specialize=["M"])
def router_partials(
    wp,
    xp,
    out,
    M,
    E: gl.constexpr,
    K: gl.constexpr,
    NT: gl.constexpr,
    SLOTS: gl.constexpr,
    EACH: gl.constexpr,
    PDL: gl.constexpr,
):
    """out fp32 ``[., M, E]``: logits over EACH parts of K, 64 * SLOTS wide, added in order; weight and x as int32."""
    tile = gl.program_id(0)
    first = gl.program_id(2) * NT
    LW: gl.constexpr = router_weight_layout()
    LX: gl.constexpr = router_activation_layout(NT)
    L: gl.constexpr = router_product_layout()
    row = gl.minimum(tile * 32 + gl.arange(0, 32, gl.SliceLayout(1, LW)), E - 1)
    start = gl.program_id(1) * (EACH * SLOTS * 32)
    weights = wp + row[:, None] * (K // 2) + (start + gl.arange(0, 32, gl.SliceLayout(0, LW)))[None, :]
    source = gl.minimum(first + gl.arange(0, NT, gl.SliceLayout(1, LX)), M - 1)
    x = xp + source[:, None] * (K // 2) + (start + gl.arange(0, 32, gl.SliceLayout(0, LX)))[None, :]
    held = first_slots(weights, SLOTS, 32, ".cg")
    pdl_launch(PDL)
    pdl_wait(PDL)
    total = gl.zeros([32, NT], gl.float32, L)
    for part in range(EACH):
        acc = gl.zeros([32, NT], gl.float32, L)
        for s in gl.static_range(SLOTS):
            acc = router_slot(acc, held[s], gl.load(x + (part * SLOTS + s) * 32), NT)
        total = total + acc
        if EACH > 1:
            held = first_slots(weights + gl.minimum(part + 1, EACH - 1) * (SLOTS * 32), SLOTS, 32, ".cg")
    expert = tile * 32 + gl.arange(0, 32, gl.SliceLayout(1, L))
    column = first + gl.arange(0, NT, gl.SliceLayout(0, L))
    live = (expert < E)[:, None] & (column < M)[None, :]
    gl.store(out + (gl.program_id(1) * M + column)[None, :] * E + expert[:, None], total, mask=live)


class CudaRouter:
    """Expert choice of a mixture-of-experts layer.

    Args:
        weight: ``[E, H]`` on the device; bfloat16 with H a multiple of 64 takes tensor cores. A stored matrix that is
            not dense is decoded to float32.
        bias: float32 ``[E]``, added to the scores for the choice only.
        top_k: experts a row.
        groups: equal runs of experts, of which the ``top_groups`` best are kept; 1 for no limit.
        normalise: divide the chosen scores by their sum.
        scale: factor of the weights.
        score: one of `SCORES`.

    Raises:
        EngineError: sizes that do not fit each other.
    """

    def __init__(
        self,
        weight: Tensor | Matrix,
        bias: Tensor,
        top_k: int,
        *,
        groups: int = 1,
        top_groups: int = 1,
        normalise: bool = True,
        scale: float = 1.0,
        score: Score = "sigmoid",
    ) -> None:
        if not isinstance(weight, Tensor):
            weight = weight.weight if isinstance(weight, DenseMatrix) else weight.dequantise()
        experts, width = weight.shape
        if groups < 1 or experts % groups or not 1 <= top_groups <= groups or top_k > top_groups * (experts // groups):
            raise EngineError(
                "the router's sizes do not fit each other",
                where="router",
                found=f"top {top_k} of {experts} experts in {groups} groups of which {top_groups} are kept",
                expected="equal groups, and at least as many experts in the kept ones as are chosen",
            )
        self.weight, self.bias = weight.contiguous(), bias.float().contiguous()
        self.top_k, self.groups, self.top_groups = top_k, groups, top_groups
        self.normalise, self.scale, self.score = normalise, scale, score
        self.experts, self.width = experts, width
        self.packed = weight.dtype == torch.bfloat16 and width % SLOT == 0
        self.slots, self.parts = part_sizes(width) if self.packed else (1, 1)

    def prepared(self) -> dict[str, Tensor]:
        """The resident tensors."""
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def from_prepared(cls, tensors: Mapping[str, Tensor], top_k: int, **options: Any) -> Self:
        """The router whose `prepared` gave ``tensors``; ``options`` as for the constructor."""
        return cls(tensors["weight"], tensors["bias"], top_k, **options)

    def logits(self, x: Tensor, launch_pdl: bool = True) -> Tensor:
        """float32 ``[S, M, E]``, to be added in order: each part of K, of many rows their sum in that order."""
        rows, pdl = x.shape[0], int(launch_pdl)
        packed = self.packed and x.dtype == torch.bfloat16
        splits = self.parts if packed and rows <= DECODE_ROWS else 1
        out = torch.empty(splits, rows, self.experts, dtype=torch.float32, device=x.device)
        if packed:
            columns = DECODE_COLUMNS if rows <= DECODE_ROWS else PREFILL_COLUMNS
            grid = (triton.cdiv(self.experts, 32), splits, triton.cdiv(rows, columns))
            router_partials[grid](
                self.weight.view(torch.int32),
                x.view(torch.int32),
                out,
                rows,
                **_partials_meta(self.experts, self.width, columns, pdl),
            )
            return out
        meta = _plain_meta(self.experts, self.width, pdl)
        plain_logits[(rows, triton.cdiv(self.experts, meta["BE"]))](self.weight, x, out, **meta)
        return out

    def __call__(self, x: Tensor, decode: bool = True, launch_pdl: bool = True) -> Routing:
        """Routing of ``x`` ``[M, H]``.

        ``decode`` changes nothing: decode and prefill rows get the same bits.
        """
        x = x.contiguous()
        ids = torch.empty(x.shape[0], self.top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(x.shape[0], self.top_k, dtype=torch.float32, device=x.device)
        if x.shape[0]:
            self.choose(self.logits(x, launch_pdl), ids, weights, launch_pdl)
        return Routing(ids, weights)

    def choose(self, logits: Tensor, ids: Tensor, weights: Tensor, launch_pdl: bool = True) -> None:
        """Fill ``ids`` and ``weights`` from partial ``logits`` ``[parts, M, E]``."""
        parts, rows, _ = logits.shape
        meta = _choice_meta(self, parts, int(launch_pdl))
        choose_experts[(rows,)](logits, self.bias, weights, ids, rows, self.scale, **meta)


def part_sizes(width: int) -> tuple[int, int]:
    """Slots of 64 k a part, and parts, of a K of ``width``: a property of the shape alone."""
    slots = math.gcd(width // SLOT, 4)
    return slots, width // (SLOT * slots)


def _partials_meta(experts: int, width: int, columns: int, pdl: int) -> dict[str, Any]:
    slots, parts = part_sizes(width)
    each = 1 if columns == DECODE_COLUMNS else parts
    options = {"E": experts, "K": width, "NT": columns, "SLOTS": slots, "EACH": each, "PDL": pdl}
    return {**options, "num_warps": WARPS, "launch_pdl": bool(pdl)}


def _plain_meta(experts: int, width: int, pdl: int) -> dict[str, Any]:
    return {"E": experts, "K": width, "BE": 16, "BK": 128, "PDL": pdl, "num_warps": 4, "launch_pdl": bool(pdl)}


def _choice_meta(router: CudaRouter, parts: int, pdl: int) -> dict[str, Any]:
    return {
        "E": router.experts,
        "EP": triton.next_power_of_2(router.experts),
        "PARTS": parts,
        "TOPK": router.top_k,
        "KP": triton.next_power_of_2(router.top_k),
        "GROUPS": router.groups,
        "KEPT": router.top_groups,
        "GP": triton.next_power_of_2(router.groups),
        "NORMALISE": router.normalise,
        "SCORE": SCORES.index(router.score),
        "PDL": pdl,
        "num_warps": 1,
        "launch_pdl": bool(pdl),
    }


def compile_cases() -> list[CompileCase]:
    """GLM-4.7's router, a limited one of 256 experts in 8 groups, and a float32 weight."""
    pointers = (torch.int32, torch.int32, torch.float32)
    cases = [
        CompileCase(
            f"router partials 160x5120 columns {n}", router_partials, (*pointers, 7), _partials_meta(160, 5120, n, 1)
        )
        for n in (DECODE_COLUMNS, PREFILL_COLUMNS)
    ]
    plain = (torch.float32, torch.bfloat16, torch.float32)
    cases.append(CompileCase("router plain 160x5120", plain_logits, plain, _plain_meta(160, 5120, 1)))
    cases_of_choice: tuple[tuple[int, int, int, int, Score], ...] = (
        (160, 1, 1, 20, "sigmoid"), (160, 1, 1, 1, "sigmoid"), (256, 8, 4, 20, "sigmoid"),
        (384, 1, 1, 20, "sqrt_softplus"),
    )  # fmt: skip
    for experts, groups, kept, parts, score in cases_of_choice:
        router = CudaRouter(
            torch.empty(experts, 5120, dtype=torch.bfloat16), torch.empty(experts), 8, groups=groups, top_groups=kept,
            score=score,
        )  # fmt: skip
        args = (torch.float32, torch.float32, torch.float32, torch.int32, 7, 2.5)
        name = f"choose 8 of {experts} groups {groups} parts {parts} {score}"
        cases.append(CompileCase(name, choose_experts, args, _choice_meta(router, parts, 1)))
    return cases
