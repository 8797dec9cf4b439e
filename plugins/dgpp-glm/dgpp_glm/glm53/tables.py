"""The binding table and the state groups of GLM-5.3."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, PagedGroup
from dgpp_core.formats.latent_layout import latent_group, latent_layout
from dgpp_glm.glm53.config import Glm53Config
from dgpp_glm.latent_tables import LatentTables, check_heads


class _Tables(LatentTables):
    divisible = ("embed",)

    def __init__(self, config: Glm53Config) -> None:
        super().__init__(config)
        self.index_layers = frozenset(config.index_layers)

    def indexer(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """Dense in every release; of some layers."""
        if index not in self.index_layers:
            return
        c = self.shapes
        yield self.dense(f"{name}.wq_b", (c.index_n_heads * c.index_head_dim, c.q_lora_rank), f"{to}_q")
        yield self.dense(f"{name}.wk", (c.index_head_dim, c.hidden_size), f"{to}_k")
        yield self.dense(f"{name}.weights_proj", (c.index_n_heads, c.hidden_size), f"{to}_gates")
        yield from self.index_norm(name, to)


def bindings(c: Glm53Config) -> BindingTable:
    """Every tensor of the checkpoint."""
    return _Tables(c).table()


def groups(c: Glm53Config, world: int, kv_dtype: str = "bf16", ranks: int = 1) -> tuple[PagedGroup, ...]:
    """Latent rows of every layer and keys of every indexer, the draft layer's last.

    ``kv_dtype`` is the latents' form, and ``ranks`` divide their blocks. Index keys are whole on every rank and stay as
    they were computed: a choice of keys turns on near ties.

    Raises:
        ConfigError: ``world`` ranks cannot share the heads, or latents cannot be stored so.
    """
    check_heads("num_attention_heads", c.num_attention_heads, world)
    layout = latent_layout(kv_dtype, c.kv_lora_rank, c.qk_rope_head_dim)
    return (
        latent_group("latent", c.num_hidden_layers + 1, layout, ranks),
        PagedGroup(name="index", layers=len(c.index_layers), heads=1, width=c.index_head_dim, dtype="compute"),
    )
