"""The binding table and the state groups of GLM-4.7."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, ConfigError, Init, PagedGroup
from dgpp_glm.glm47.config import Glm47Config
from dgpp_glm.tables import Tables, vector


class _Tables(Tables):
    def __init__(self, config: Glm47Config) -> None:
        super().__init__(config)
        self.shapes = config

    def attention(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """Queries, keys and values as one parameter, divided by heads."""
        c, draft = self.shapes, index == self.c.num_hidden_layers
        sizes = {"q": c.num_attention_heads * c.head_dim, "k": c.num_key_value_heads * c.head_dim}
        sizes["v"] = sizes["k"]
        for part, size in sizes.items():
            yield self.matrix(f"{name}.{part}_proj", (size, c.hidden_size), f"{to}.qkv", cut=0, draft=draft)
        for part, size in sizes.items():
            yield vector(f"{name}.{part}_proj.bias", f"{to}.qkv_bias", size, cut=0, init=Init(std=0.2))
        yield vector(f"{name}.q_norm.weight", f"{to}.q_norm", c.head_dim)
        yield vector(f"{name}.k_norm.weight", f"{to}.k_norm", c.head_dim)
        yield self.matrix(f"{name}.o_proj", (c.hidden_size, sizes["q"]), f"{to}.o", cut=1, draft=draft)


def bindings(c: Glm47Config) -> BindingTable:
    """Every tensor of the checkpoint. The scales of an 8-bit cache are passed over."""
    return _Tables(c).table("*.self_attn.k_proj.k_scale", "*.self_attn.v_proj.v_scale")


def groups(c: Glm47Config, world: int) -> tuple[PagedGroup, ...]:
    """Keys and values of a rank's heads: a layer each, and the draft layer behind them.

    Raises:
        ConfigError: ``world`` ranks cannot share the heads.
    """
    if c.num_key_value_heads % world:
        raise ConfigError(
            "the key/value heads cannot be divided among the ranks",
            where="world_size",
            found=str(world),
            expected=f"a divisor of num_key_value_heads, {c.num_key_value_heads}",
        )
    heads, layers = c.num_key_value_heads // world, c.num_hidden_layers + 1
    return tuple(PagedGroup(name=n, layers=layers, heads=heads, width=c.head_dim, dtype="compute") for n in ("k", "v"))
