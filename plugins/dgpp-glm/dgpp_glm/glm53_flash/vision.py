"""What config.json says of the images' encoder, and its tensors. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dgpp_core.api import SEEN_TOKENS, Binding, Init, encoder_section, refuse

VISUAL = "model.visual"
BLOCK_EPS = 1e-6
"""Of the norms before a block's sublayers, where config.json says nothing of them.

Its `rms_norm_eps` is 1e-5 and transformers takes that everywhere, while a server states that the encoder was trained
with 1e-6 there and describes images worse with 1e-5.
"""


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and constants of the encoder.

    Attributes:
        placeholder: the token in whose place an image's rows stand.
        inner: of a block's feed-forward; ``merger_inner``: of that which makes the rows.
        output: width of a row.
        limit: of what feed-forwards gate, as in `dgpp_core.ops.activation.swiglu`.
        eps: of the norms of queries, keys and what leaves the last block; ``block_eps``: of those before sublayers.
    """

    placeholder: int
    depth: int
    width: int
    heads: int
    inner: int
    output: int
    merger_inner: int
    limit: float
    eps: float
    block_eps: float
    patch_size: int = 14
    merge_size: int = 2
    frames: int = 2

    @property
    def patch_values(self) -> int:
        """Of a patch: colours, frames, pixels."""
        return 3 * self.frames * self.patch_size**2

    @property
    def working_bytes(self) -> int:
        """The most that encoding an image takes beside its rows, all in float32.

        The most is taken by attention, by a block's feed-forward, or by that of the squares.
        """
        patches = 2 * self.patch_values + 2 * self.width + max(16 * self.width, 7 * self.inner)
        squares = 2 * self.output + 7 * self.merger_inner
        return 4 * SEEN_TOKENS * max(patches * self.merge_size**2, squares)


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    swiglu_limit: float = 10.0
    rms_norm_eps: float = 1e-5
    block_norm_eps: float = BLOCK_EPS
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    hidden_act: str = "silu"
    attention_bias: bool = True
    rope_parameters: dict[str, Any] | None = None


_ONLY: Mapping[str, object] = {
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "hidden_act": "silu",
    "attention_bias": True,
}  # fmt: skip
_POSITIVE = ("intermediate_size", "projection_intermediate_size", "swiglu_limit", "rms_norm_eps", "block_norm_eps")
_TURNS: Mapping[str, object] = {"rope_type": "axial", "rope_theta": 10000.0}


def read_encoding(raw: Mapping[str, Any], *, width: int, vocab: int) -> Encoding:
    """The encoder that a config.json describes.

    Args:
        raw: the whole of it, with a `vision_config`.
        width: of the text model.
        vocab: the vocabulary's size.

    Raises:
        ConfigError: naming the key that is missing or not supported.
    """
    c, token = encoder_section(raw, _Json, positive=_POSITIVE, only=_ONLY, width=width, vocab=vocab)
    for name, only in _TURNS.items():
        if (value := (c.rope_parameters or {}).get(name, only)) != only:
            raise refuse(f"vision_config.rope_parameters.{name}", value, repr(only))
    return Encoding(
        placeholder=token, depth=c.depth, width=c.hidden_size, heads=c.num_heads, inner=c.intermediate_size,
        output=c.out_hidden_size, merger_inner=c.projection_intermediate_size, limit=c.swiglu_limit,
        eps=c.rms_norm_eps, block_eps=c.block_norm_eps,
    )  # fmt: skip


def _tensor(name: str, shape: tuple[int, ...], to: str, init: Init) -> Binding:
    """The same on every rank, and used as it is."""
    return Binding(name=f"{VISUAL}.{name}", shape=shape, target=f"encoder.{to}", role="vector", init=init)


def _weight(name: str, shape: tuple[int, ...], to: str) -> Binding:
    return _tensor(f"{name}.weight", shape, to, Init(std=math.prod(shape[1:]) ** -0.5))


def _dense(name: str, shape: tuple[int, ...], to: str) -> Iterator[Binding]:
    """A matrix and its bias."""
    yield _weight(name, shape, f"{to}.weight")
    yield _tensor(f"{name}.bias", shape[:1], f"{to}.bias", Init(std=0.1))


def _norm(name: str, size: int, to: str) -> Binding:
    return _tensor(f"{name}.weight", (size,), to, Init(std=0.2, mean=1.0))


def _block(c: Encoding, name: str) -> Iterator[Binding]:
    for norm in ("norm1", "norm2"):
        yield _norm(f"{name}.{norm}", c.width, f"{name}.{norm}")
    for norm in ("q_norm", "k_norm"):
        yield _norm(f"{name}.attn.{norm}", c.width // c.heads, f"{name}.{norm}")
    yield from _dense(f"{name}.attn.qkv", (3 * c.width, c.width), f"{name}.qkv")
    yield from _dense(f"{name}.attn.proj", (c.width, c.width), f"{name}.proj")
    for part in ("gate", "up"):
        yield from _dense(f"{name}.mlp.{part}_proj", (c.inner, c.width), f"{name}.gate_up")
    yield from _dense(f"{name}.mlp.down_proj", (c.width, c.inner), f"{name}.down")


def encoder_bindings(c: Encoding) -> Iterator[Binding]:
    """Every tensor of the encoder."""
    yield from _dense("patch_embed.proj", (c.width, 3, c.frames, c.patch_size, c.patch_size), "patch")
    for index in range(c.depth):
        yield from _block(c, f"blocks.{index}")
    yield _norm("post_layernorm", c.width, "norm")
    yield from _dense("downsample", (c.output, c.width, c.merge_size, c.merge_size), "squares")
    yield _weight("merger.proj", (c.output, c.output), "merger.proj")
    yield _norm("merger.post_projection_norm", c.output, "merger.norm.weight")
    yield _tensor("merger.post_projection_norm.bias", (c.output,), "merger.norm.bias", Init(std=0.1))
    for part in ("gate", "up"):
        yield _weight(f"merger.{part}_proj", (c.merger_inner, c.output), "merger.gate_up")
    yield _weight("merger.down_proj", (c.output, c.merger_inner), "merger.down")
