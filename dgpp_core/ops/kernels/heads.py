"""Attention heads on their way out of the projection: bias, norm over the head, rotation, all in float32.

One function for queries and keys, for decode and for prefill, so that a cache row has the same formula wherever it is
written. Formulas: `dgpp_core.ops.norm` and `dgpp_core.ops.rope`.
"""
# mypy: disallow_untyped_defs=False, disallow_untyped_decorators=False, disallow_untyped_calls=False

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from msgspec import Struct


class HeadShape(Struct, frozen=True):
    """Everything of an attention layer that is compiled into its kernels.

    Attributes:
        kv_heads: key/value heads of this rank; ``share`` query heads read each.
        width: of a head.
        rotated: leading dimensions of a head that turn; even, 0 for none.
        block: tokens a block of the pools, a power of two.
        biased, normed: whether the projections have biases and the heads norms.
    """

    kv_heads: int
    share: int
    width: int
    rotated: int
    block: int
    biased: bool
    normed: bool

    def meta(self) -> dict[str, Any]:
        """Compile-time arguments that all the kernels take."""
        span = max(16, triton.next_power_of_2(self.width))
        return {"KV": self.kv_heads, "SHARE": self.share, "WIDTH": self.width, "SPAN": span, "BLOCK": self.block}

    @classmethod
    def served(cls) -> dict[str, HeadShape]:
        """What is compiled ahead of time: GLM-4.7 on one, two and four GPUs, and a model without biases and norms."""
        return {
            "GLM-4.7": cls(8, 12, 128, 64, 64, True, True),
            "GLM-4.7 of two": cls(4, 12, 128, 64, 64, True, True),
            "GLM-4.7 of four": cls(2, 12, 128, 64, 64, True, True),
            "SmolLM2": cls(3, 3, 64, 64, 64, False, False),
        }


@triton.jit
def head_parameters(
    bias,
    weight,
    cos,
    sin,
    live,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    HALF: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """What `turned_heads` applies to heads, six tensors; none depends on the step's products.

    Args:
        bias: pointers ``[lines, 1]`` to the biases of one head a line; read if BIASED.
        weight: pointer to the norm's ``[WIDTH]``; read if NORMED.
        cos, sin: pointers ``[lines, 1]`` to the ``[HALF]`` angles of each line's position; read if HALF is not 0.
        live: bool ``[lines, 1]``.
        WIDTH: of a head; SPAN is the power of two that holds it.
        HALF: rotated pairs: dimension i < HALF turns with i + HALF, the rest pass.
    """
    d = tl.arange(0, SPAN)[None, :]
    pair, angle = _partners(SPAN, HALF)
    turning = live & (d < 2 * HALF)
    b = tl.zeros([1, 1], tl.float32)
    b_pair = b
    w = b
    w_pair = b
    c = b
    s = b
    if BIASED:
        b = tl.load(bias + d, mask=live & (d < WIDTH), other=0.0).to(tl.float32)
    if NORMED:
        w = tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    if HALF > 0:
        c = tl.load(cos + angle, mask=turning, other=1.0)
        s = tl.load(sin + angle, mask=turning, other=0.0)
        s = tl.where(d < HALF, -s, s)
        if BIASED:
            b_pair = tl.load(bias + pair, mask=turning, other=0.0).to(tl.float32)
        if NORMED:
            w_pair = tl.load(weight + pair, mask=d < 2 * HALF, other=0.0).to(tl.float32)
    return b, b_pair, w, w_pair, c, s


@triton.jit
def _partners(SPAN: tl.constexpr, HALF: tl.constexpr):
    """The dimension that each turns with, and the number of its angle, ``[1, SPAN]``; runs of them are contiguous."""
    i = tl.arange(0, SPAN)
    if HALF == 0:
        return i[None, :], i[None, :]
    RUN: tl.constexpr = HALF & -HALF
    pair = tl.multiple_of(tl.max_contiguous(tl.where(i < HALF, i + HALF, i - HALF), RUN), RUN)
    angle = tl.multiple_of(tl.max_contiguous(tl.where(i < HALF, i, i - HALF), RUN), RUN)
    return pair[None, :], angle[None, :]


@triton.jit
def raw_heads(x, live, WIDTH: tl.constexpr, SPAN: tl.constexpr, HALF: tl.constexpr):
    """Heads as projected, float32 ``[lines, SPAN]``, and the dimension that each element turns with.

    Args:
        x: pointers ``[lines, 1]`` to heads of the projections' float32 output.
        live: bool ``[lines, 1]``; other lines are zero.
    """
    d = tl.arange(0, SPAN)[None, :]
    own = tl.load(x + d, mask=live & (d < WIDTH), other=0.0)
    if HALF == 0:
        return own, own
    pair, _ = _partners(SPAN, HALF)
    return own, tl.load(x + pair, mask=live & (d < 2 * HALF), other=0.0)


@triton.jit
def turned_heads(
    raw,
    parameters,
    eps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """`raw_heads` with bias, norm and rotation of `head_parameters`; lines that are not live stay zero."""
    own, other = raw
    b, b_pair, w, w_pair, c, s = parameters
    if BIASED:
        own += b
    if NORMED:
        factor = tl.rsqrt(tl.sum(own * own, 1) / WIDTH + eps)[:, None]
        own = own * factor * w
    if HALF > 0:
        if BIASED:
            other += b_pair
        if NORMED:
            other = other * factor * w_pair
        own = own * c + other * s
    return own
