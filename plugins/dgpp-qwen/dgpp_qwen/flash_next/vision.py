"""What config.json says of the images' encoder, and its tensors. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dgpp_core.api import SEEN_TOKENS, Binding, Init, encoder_section, refuse

VISUAL = "model.visual"


class Encoding(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes of the encoder.

    Attributes:
        placeholder: the token in whose place an image's rows stand.
        side: of the square of learned positions.
        sections: turned dimensions of the text model, in pairs, that follow time, row and column.
    """

    placeholder: int
    depth: int
    width: int
    heads: int
    inner: int
    output: int
    side: int
    sections: tuple[int, int, int]
    patch_size: int = 16
    merge_size: int = 2
    frames: int = 2

    @property
    def patch_values(self) -> int:
        """Of a patch: colours, frames, pixels."""
        return 3 * self.frames * self.patch_size**2

    @property
    def working_bytes(self) -> int:
        """The most that encoding an image takes beside its rows, all in float32: in attention or in a feed-forward."""
        values = 2 * self.patch_values + max(16 * self.width, 3 * self.width + 2 * self.inner)
        return 4 * SEEN_TOKENS * self.merge_size**2 * values


class _Json(msgspec.Struct, frozen=True, kw_only=True):
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    num_position_embeddings: int
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2
    in_channels: int = 3
    hidden_act: str = "gelu_pytorch_tanh"
    deepstack_visual_indexes: list[int] = []


_ONLY: Mapping[str, object] = {
    "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [],
}  # fmt: skip


def read_encoding(raw: Mapping[str, Any], rope: Mapping[str, Any], *, width: int, rotary: int, vocab: int) -> Encoding:
    """The encoder that a config.json describes.

    Args:
        raw: the whole of it, with a `vision_config`.
        rope: `rope_parameters` of the text model.
        width: of a branch of the text model.
        rotary: turned dimensions of a head there.
        vocab: the vocabulary's size.

    Raises:
        ConfigError: naming the key that is missing or not supported.
    """
    positive = ("intermediate_size", "num_position_embeddings")
    found, token = encoder_section(raw, _Json, positive=positive, only=_ONLY, width=width, vocab=vocab)
    side = math.isqrt(found.num_position_embeddings)
    if side * side != found.num_position_embeddings:
        raise refuse("vision_config.num_position_embeddings", found.num_position_embeddings, "a square")
    return Encoding(
        placeholder=token, depth=found.depth, width=found.hidden_size, heads=found.num_heads,
        inner=found.intermediate_size, output=found.out_hidden_size, side=side, sections=_sections(rope, rotary),
    )  # fmt: skip


def _sections(rope: Mapping[str, Any], rotary: int) -> tuple[int, int, int]:
    name, found = "text_config.rope_parameters.mrope_section", rope.get("mrope_section")
    if rope.get("mrope_interleaved") is not True:
        where = "text_config.rope_parameters.mrope_interleaved"
        raise refuse(where, rope.get("mrope_interleaved"), "True")
    try:
        sections = msgspec.convert(found, tuple[int, int, int])
    except msgspec.ValidationError:
        raise refuse(name, found, "three numbers") from None
    if sum(sections) != rotary // 2 or not 0 <= sections[2] <= sections[1] <= sections[0]:
        raise refuse(name, found, f"three numbers that fall and come to {rotary // 2}")
    return sections


def axes(sections: tuple[int, int, int]) -> tuple[int, ...]:
    """Which of time, row and column each pair of dimensions follows: they take turns as long as their sections last."""
    found = [0] * sum(sections)
    for axis in (1, 2):
        found[axis : 3 * sections[axis] : 3] = [axis] * len(found[axis : 3 * sections[axis] : 3])
    return tuple(found)


def encoder_bindings(c: Encoding) -> Iterator[Binding]:
    """Every tensor of the encoder; the same on every rank, and used as they are."""

    def tensor(name: str, shape: tuple[int, ...], to: str, init: Init) -> Binding:
        return Binding(name=f"{VISUAL}.{name}", shape=shape, target=f"encoder.{to}", role="vector", init=init)

    def dense(name: str, shape: tuple[int, ...], to: str) -> Iterator[Binding]:
        yield tensor(f"{name}.weight", shape, f"{to}.weight", Init(std=math.prod(shape[1:]) ** -0.5))
        yield tensor(f"{name}.bias", shape[:1], f"{to}.bias", Init(std=0.1))

    def norm(name: str, to: str) -> Iterator[Binding]:
        yield tensor(f"{name}.weight", (c.width,), f"{to}.weight", Init(std=0.2, mean=1.0))
        yield tensor(f"{name}.bias", (c.width,), f"{to}.bias", Init(std=0.1))

    yield from dense("patch_embed.proj", (c.width, 3, c.frames, c.patch_size, c.patch_size), "patch")
    yield tensor("pos_embed.weight", (c.side**2, c.width), "positions", Init(std=0.5))
    for index in range(c.depth):
        name, to = f"blocks.{index}", f"blocks.{index}"
        yield from norm(f"{name}.norm1", f"{to}.norm1")
        yield from norm(f"{name}.norm2", f"{to}.norm2")
        yield from dense(f"{name}.attn.qkv", (3 * c.width, c.width), f"{to}.qkv")
        yield from dense(f"{name}.attn.proj", (c.width, c.width), f"{to}.proj")
        yield from dense(f"{name}.mlp.linear_fc1", (c.inner, c.width), f"{to}.fc1")
        yield from dense(f"{name}.mlp.linear_fc2", (c.width, c.inner), f"{to}.fc2")
    merged = c.width * c.merge_size**2
    yield from norm("merger.norm", "merger.norm")
    yield from dense("merger.linear_fc1", (merged, merged), "merger.fc1")
    yield from dense("merger.linear_fc2", (c.output, merged), "merger.fc2")
