"""The binding table and the state groups of GLM-5.3."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dgpp_core.api import Binding, BindingTable, ConfigError, Init, PagedGroup
from dgpp_core.formats.latent_layout import latent_group, latent_layout
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.tables import Tables, vector


class _Tables(Tables):
    shared_apart = True

    def __init__(self, config: Glm53Config) -> None:
        super().__init__(config)
        self.shapes, self.index_layers = config, frozenset(config.index_layers)

    def attention(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """Heads are divided; the products that make latents, and the indexer, are every rank's."""
        c = self.shapes
        heads, hidden = c.num_attention_heads, c.hidden_size
        keys, rope = c.qk_nope_head_dim, c.qk_rope_head_dim
        yield self.matrix(f"{name}.q_a_proj", (c.q_lora_rank, hidden), f"{to}.q_latent")
        yield vector(f"{name}.q_a_layernorm.weight", f"{to}.q_norm", c.q_lora_rank)
        yield self.matrix(f"{name}.q_b_proj", (heads * (keys + rope), c.q_lora_rank), f"{to}.q", cut=0)
        yield self.matrix(f"{name}.kv_a_proj_with_mqa", (c.kv_lora_rank + rope, hidden), f"{to}.latent")
        expand = self.matrix(
            f"{name}.kv_b_proj", (heads * (keys + c.v_head_dim), c.kv_lora_rank), f"{to}.expand", cut=0
        )
        # The absorbed form multiplies with it by heads and from both sides, for which no stored form is laid out.
        yield msgspec.structs.replace(expand, resident="dense")
        yield vector(f"{name}.kv_a_layernorm.weight", f"{to}.latent_norm", c.kv_lora_rank)
        if index in self.index_layers:
            yield from self.indexer(f"{name}.indexer", f"{to}.index")
        yield self.matrix(f"{name}.o_proj", (hidden, heads * c.v_head_dim), f"{to}.o", cut=1)

    def indexer(self, name: str, to: str) -> Iterator[Binding]:
        """Dense in every release."""
        c = self.shapes
        yield self.dense(f"{name}.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), f"{to}_q")
        yield self.dense(f"{name}.wk", (c.index_head_dim, c.hidden_size), f"{to}_k")
        yield self.dense(f"{name}.weights_proj", (c.index_n_heads, c.hidden_size), f"{to}_gates")
        yield vector(f"{name}.k_norm.weight", f"{to}_norm", c.index_head_dim)
        yield vector(f"{name}.k_norm.bias", f"{to}_bias", c.index_head_dim, init=Init(std=0.2))


def bindings(c: Glm53Config) -> BindingTable:
    """Every tensor of the checkpoint."""
    return _Tables(c).table()


def groups(c: Glm53Config, world: int, kv_dtype: str = "bf16") -> tuple[PagedGroup, ...]:
    """Latent rows of every layer and keys of every indexer, the draft layer's last: whole on every rank.

    ``kv_dtype`` is the latents' form. Index keys stay as they were computed: a choice of keys turns on near ties.

    Raises:
        ConfigError: ``world`` ranks cannot share the heads, or latents cannot be stored so.
    """
    if c.num_attention_heads % world:
        raise ConfigError(
            "the heads cannot be divided among the ranks",
            where="world_size",
            found=str(world),
            expected=f"a divisor of num_attention_heads, {c.num_attention_heads}",
        )
    layout = latent_layout(kv_dtype, c.kv_lora_rank, c.qk_rope_head_dim)
    return (
        latent_group("latent", c.num_hidden_layers + 1, layout),
        PagedGroup(name="index", layers=len(c.index_layers), heads=1, width=c.index_head_dim, dtype="compute"),
    )
