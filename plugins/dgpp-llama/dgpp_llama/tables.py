"""The binding table and the state groups of a Llama model."""

from __future__ import annotations

from dgpp_core.api import Binding, BindingTable, Init, PagedGroup
from dgpp_llama.config import LlamaConfig


def _vector(name: str, target: str, size: int) -> Binding:
    return Binding(name=name, shape=(size,), target=target, role="vector", init=Init(std=0.02, mean=1.0))


def bindings(c: LlamaConfig) -> BindingTable:
    """Every tensor of the checkpoint, in the order in which `LlamaModel` takes its parameters."""
    h, q, kv, f = (
        c.hidden_size,
        c.num_attention_heads * c.head_dim,
        c.num_key_value_heads * c.head_dim,
        c.intermediate_size,
    )
    out = [Binding(name="model.embed_tokens.weight", shape=(c.vocab_size, h), target="embed", role="embedding")]
    for i in range(c.num_hidden_layers):
        name, to = f"model.layers.{i}.", f"layers.{i}."
        out += [
            _vector(name + "input_layernorm.weight", to + "attention_norm", h),
            Binding(name=name + "self_attn.q_proj.weight", shape=(q, h), target=to + "qkv", cut=0),
            Binding(name=name + "self_attn.k_proj.weight", shape=(kv, h), target=to + "qkv", cut=0),
            Binding(name=name + "self_attn.v_proj.weight", shape=(kv, h), target=to + "qkv", cut=0),
            Binding(name=name + "self_attn.o_proj.weight", shape=(h, q), target=to + "o", cut=1),
            _vector(name + "post_attention_layernorm.weight", to + "mlp_norm", h),
            Binding(name=name + "mlp.gate_proj.weight", shape=(f, h), target=to + "gate_up", cut=0),
            Binding(name=name + "mlp.up_proj.weight", shape=(f, h), target=to + "gate_up", cut=0),
            Binding(name=name + "mlp.down_proj.weight", shape=(h, f), target=to + "down", cut=1),
        ]
    out.append(_vector("model.norm.weight", "norm", h))
    if not c.tied:
        out.append(Binding(name="lm_head.weight", shape=(c.vocab_size, h), target="head"))
    ignored = ("*.rotary_emb.inv_freq", *(("lm_head.weight",) if c.tied else ()))
    return BindingTable(tuple(out), ignored, shared=(("embed", "head"),) if c.tied else ())


def groups(c: LlamaConfig, world: int) -> tuple[PagedGroup, ...]:
    """Keys and values: a rank keeps its share of the key/value heads."""
    heads = c.num_key_value_heads // world
    return tuple(PagedGroup(name=n, layers=c.num_hidden_layers, heads=heads, width=c.head_dim) for n in ("k", "v"))
