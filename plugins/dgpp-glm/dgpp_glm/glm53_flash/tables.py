"""The binding table and the state groups of GLM-5.3-Flash."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dgpp_core.api import (
    Binding,
    BindingTable,
    ConfigError,
    Init,
    PagedGroup,
    RecurrentGroup,
    StateGroup,
    WindowGroup,
)
from dgpp_core.formats.latent_layout import latent_group, latent_layout
from dgpp_glm.glm53_flash.config import FlashConfig
from dgpp_glm.glm53_flash.vision import VISUAL, encoder_bindings
from dgpp_glm.latent_tables import LatentTables, check_heads

FLOAT32 = ("F32",)


def _own(
    name: str, shape: tuple[int, ...], target: str, init: Init, *, formats: tuple[str, ...] = (), cut: int | None = None
) -> Binding:
    """A parameter that is no matrix."""
    formats = formats or ("F32", "BF16", "F16")
    return Binding(name=name, shape=shape, target=target, role="vector", init=init, formats=formats, cut=cut)


def _matrix(name: str, shape: tuple[int, int], target: str) -> Binding:
    """A matrix whose name in the checkpoint does not end in ``.weight``."""
    return Binding(name=name, shape=shape, target=target, init=Init(std=shape[1] ** -0.5))


class _Tables(LatentTables):
    prefix = "model.language_model"

    def __init__(self, config: FlashConfig) -> None:
        super().__init__(config)
        self.flash = config

    def layer(self, index: int) -> Iterator[Binding]:
        """The draft layer alone has one residual stream."""
        yield from super().layer(index)
        if index < self.c.num_hidden_layers:
            for site, to in (("attn", "attention"), ("ffn", "mlp")):
                yield from self.site(f"{self.prefix}.layers.{index}.hc_{site}", f"layers.{index}.{to}_site")

    def site(self, name: str, to: str) -> Iterator[Binding]:
        """The hyper-connection of a sublayer."""
        streams = self.flash.hc_mult
        values = streams * (2 + streams)
        yield _matrix(f"{name}_fn", (values, streams * self.c.hidden_size), f"{to}.fn")
        yield _own(f"{name}_base", (values,), f"{to}.base", Init(std=0.5), formats=FLOAT32)
        yield _own(f"{name}_scale", (3,), f"{to}.scale", Init(std=0.2, mean=0.7), formats=FLOAT32)

    def attention(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """Of either kind."""
        latents = (*self.flash.sparse, True)[index]
        yield from super().attention(name, to, index) if latents else self.delta(name, to)

    def delta(self, name: str, to: str) -> Iterator[Binding]:
        """Delta attention, dense in every release; heads are divided, the narrow products are every rank's."""
        c, size, hidden, width = self.flash, self.flash.linear_size, self.c.hidden_size, self.flash.linear_width
        for part in "qkv":
            yield self.dense(f"{name}.{part}_proj", (size, hidden), f"{to}.in", cut=0)
        yield self.dense(f"{name}.b_proj", (c.linear_heads, hidden), f"{to}.in", cut=0)
        for part in "qkv":
            taps = Init(std=c.linear_taps**-0.5)
            yield _own(f"{name}.{part}_conv1d.weight", (size, 1, c.linear_taps), f"{to}.conv", taps, cut=0)
        for part in "fg":
            yield self.dense(f"{name}.{part}_a_proj", (width, hidden), f"{to}.narrow")
            yield self.dense(f"{name}.{part}_b_proj", (size, width), f"{to}.{part}", cut=0)
        yield _own(f"{name}.A_log", (c.linear_heads,), f"{to}.a_log", Init(std=0.5), formats=FLOAT32, cut=0)
        yield _own(f"{name}.dt_bias", (size,), f"{to}.dt_bias", Init(std=1.0, mean=-1.0), formats=FLOAT32, cut=0)
        yield _own(f"{name}.o_norm.weight", (width,), f"{to}.o_norm", Init(std=0.2, mean=1.0))
        yield self.dense(f"{name}.o_proj", (hidden, size), f"{to}.o", cut=1)

    def indexer(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """Dense in every release; its products of the stream are one: keys, their weights in a block, gates."""
        c = self.flash
        yield self.dense(f"{name}.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), f"{to}_q")
        yield self.dense(f"{name}.wk", (c.index_head_dim, c.hidden_size), f"{to}_in")
        yield _matrix(f"{name}.index_kpool_compress_gate", (c.index_head_dim, c.hidden_size), f"{to}_in")
        yield self.dense(f"{name}.weights_proj", (c.index_n_heads, c.hidden_size), f"{to}_in")
        yield from self.index_norm(name, to)
        places = (c.index_kpool, c.index_head_dim)
        yield _own(f"{name}.index_kpool_compress_ape", places, f"{to}_places", Init(std=0.5))


def bindings(c: FlashConfig) -> BindingTable:
    """Every tensor of the model and its draft layer; those of an encoder that is not used are passed over."""
    if c.encoding is None:
        return _Tables(c).table(f"{VISUAL}.*")
    text = _Tables(c).table()
    return msgspec.structs.replace(text, tensors=(*encoder_bindings(c.encoding), *text.tensors))


def groups(c: FlashConfig, world: int, settings: Mapping[str, Any]) -> tuple[StateGroup, ...]:
    """Latents and pooled index keys, the draft layer's last, whole on every rank; a rank's share of the delta states.

    ``kv_dtype`` is the latents' form. Index keys stay as they were computed: a choice of keys turns on near ties.

    Raises:
        ConfigError: ``world`` ranks cannot share the heads, latents cannot be stored so, or blocks of that many tokens
            would cut an index block.
    """
    check_heads("num_attention_heads", c.num_attention_heads, world)
    check_heads("linear_attn_config.num_heads", c.linear_heads, world)
    if (tokens := int(settings.get("block_tokens", c.index_kpool))) % c.index_kpool:
        raise ConfigError(
            "a paged block would cut a block of index keys",
            where="engine.block_tokens",
            found=str(tokens),
            expected=f"a multiple of {c.index_kpool}",
        )
    latents, width, linear = c.latent_layers, c.index_head_dim, c.sparse.count(False)
    layout = latent_layout(str(settings.get("kv_dtype", "bf16")), c.kv_lora_rank, 0)

    def window(name: str, layers: int, width: int, rows: int) -> WindowGroup:
        return WindowGroup(name=name, layers=layers, heads=1, width=width, window=rows, dtype="compute")

    return (
        latent_group("latent", latents, layout, int(settings.get("decode_context_parallel", 1))),
        PagedGroup(name="index", layers=latents, heads=1, width=width // c.index_kpool, dtype="compute"),
        window("index_tail", latents, 2 * width, c.index_kpool - 1),
        window("conv", linear, 3 * c.linear_size // world, c.linear_taps - 1),
        RecurrentGroup(name="delta", layers=linear, shape=(c.linear_heads // world, c.linear_width, c.linear_width)),
    )
