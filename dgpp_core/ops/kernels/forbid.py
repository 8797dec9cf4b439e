"""Forbidden tokens on a GPU: -inf is written where a bit of a row's mask is clear, and nothing is read but the mask."""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dgpp_core.ops.kernels.cases import CompileCase

CHUNK = 1024
"""Ids that one program takes."""


@triton.jit
def forbid_tokens(logits, masks, V: tl.constexpr, WORDS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Grid (ceil(V / CHUNK), rows): logits fp32 ``[rows, V]`` in place, masks int32 ``[rows, WORDS]``."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    word = tl.load(masks + row * WORDS + i // 32, mask=i < V, other=-1)
    tl.store(logits + row * V + i, float("-inf"), mask=(i < V) & (((word >> (i % 32)) & 1) == 0))


def forbid(logits: Tensor, masks: Tensor) -> None:
    """See `dgpp_core.ops.forbid.forbid`; both are contiguous."""
    rows, vocab = logits.shape
    forbid_tokens[(triton.cdiv(vocab, CHUNK), rows)](
        logits, masks, V=vocab, WORDS=masks.shape[1], CHUNK=CHUNK, PDL=True, num_warps=4, launch_pdl=True
    )


def compile_cases() -> list[CompileCase]:
    """The vocabulary of GLM-4.7, whole."""
    meta = {"V": 151552, "WORDS": 4736, "CHUNK": CHUNK, "PDL": True, "num_warps": 4, "launch_pdl": True}
    return [CompileCase("forbid_tokens", forbid_tokens, (torch.float32, torch.int32), meta)]
