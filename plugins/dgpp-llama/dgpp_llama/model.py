"""The arithmetic of a Llama model (Touvron et al., 2023), one rank of it."""

from __future__ import annotations

from torch import Tensor

from dgpp_core.api import Shard, State, StepBatch
from dgpp_core.layers.paged import PagedIndex
from dgpp_core.ops.activation import swiglu
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.rope import RotaryTable, rotate
from dgpp_llama.config import LlamaConfig


class Layer:
    """Attention and feed-forward of one layer."""

    def __init__(self, config: LlamaConfig, index: int, shard: Shard) -> None:
        def take(name: str) -> Tensor:
            return shard.weights.take(f"layers.{index}.{name}")

        self.index, self.eps, self.bus = index, config.rms_norm_eps, shard.bus
        self.width, self.scale = config.head_dim, config.head_dim**-0.5
        self.heads = config.num_attention_heads // shard.bus.world
        self.kv_heads = config.num_key_value_heads // shard.bus.world
        self.attention_norm, self.qkv, self.o = take("attention_norm"), Linear(take("qkv")), Linear(take("o"))
        self.mlp_norm, self.gate_up, self.down = take("mlp_norm"), Linear(take("gate_up")), Linear(take("down"))

    def attention(self, x: Tensor, angles: tuple[Tensor, Tensor], index: PagedIndex, state: State) -> Tensor:
        """Causal grouped-query attention over the request's rows; ``[R, hidden]``."""
        heads = self.qkv(x).view(x.shape[0], self.heads + 2 * self.kv_heads, self.width)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # type: ignore[no-untyped-call]
        k_pool, v_pool = state["k"][self.index], state["v"][self.index]
        index.write(k_pool, rotate(k, *angles))
        index.write(v_pool, v)
        out = index.attend(rotate(q, *angles), k_pool, v_pool, self.scale)
        return self.bus.all_reduce(self.o(out.flatten(1)))

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], index: PagedIndex, state: State) -> Tensor:
        """One layer with its residual connections."""
        x = x + self.attention(rms_norm(x, self.attention_norm, self.eps), angles, index, state)
        return x + self.bus.all_reduce(self.down(swiglu(self.gate_up(rms_norm(x, self.mlp_norm, self.eps)))))


class LlamaModel:
    """Implements `dgpp_core.api.Model`."""

    def __init__(self, config: LlamaConfig, shard: Shard) -> None:
        self.config = config
        self.embed = shard.weights.take("embed")
        self.layers = [Layer(config, i, shard) for i in range(config.num_hidden_layers)]
        self.norm = shard.weights.take("norm")
        self.head = Linear(self.embed if config.tied else shard.weights.take("head"))
        self.rope = RotaryTable(config.head_dim, config.max_positions, config.rope_theta, shard.device)

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """Hidden states after the last norm, ``[R, hidden_size]``."""
        index, angles = PagedIndex(batch, state["k"].shape[3]), self.rope.at(batch.positions)
        x = self.embed[batch.tokens]
        for layer in self.layers:
            x = layer(x, angles, index, state)
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 ``[N, vocab_size]``."""
        return self.head(hidden).float()
