"""Bindings and state of attention to latents whose keys are chosen: what GLM-5.3 and GLM-5.3-Flash have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import msgspec

from dgpp_core.api import Binding, ConfigError, Init
from dgpp_glm.config import LatentConfig
from dgpp_glm.tables import Tables, vector


class LatentTables(Tables):
    """Bindings of one config."""

    shared_apart = True

    def __init__(self, config: LatentConfig) -> None:
        super().__init__(config)
        self.shapes = config

    @abstractmethod
    def indexer(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """The indexer of a layer, if it has one; of each model its own."""

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
        yield from self.indexer(f"{name}.indexer", f"{to}.index", index)
        yield self.matrix(f"{name}.o_proj", (hidden, heads * c.v_head_dim), f"{to}.o", cut=1)

    def index_norm(self, name: str, to: str) -> Iterator[Binding]:
        """Of the indexer's keys."""
        yield vector(f"{name}.k_norm.weight", f"{to}_norm", self.shapes.index_head_dim)
        yield vector(f"{name}.k_norm.bias", f"{to}_bias", self.shapes.index_head_dim, init=Init(std=0.2))


def check_heads(name: str, heads: int, world: int) -> None:
    """Refuse a number of ranks that cannot share ``heads``, a key of config.json.

    Raises:
        ConfigError: naming both.
    """
    if heads % world:
        raise ConfigError(
            "the heads cannot be divided among the ranks",
            where="world_size",
            found=str(world),
            expected=f"a divisor of {name}, {heads}",
        )
