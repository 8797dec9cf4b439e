"""The binding table and the state groups of MiMo-V2.6-Flash."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, ConfigError, Init, PagedGroup, Stack, StateGroup, WindowGroup
from dgpp_core.api.state import Dtype
from dgpp_mimo.mimo26.config import BLOCKS, Heads, Mimo26Config

SCALE_BYTES = 4
"""Of a row of keys or values in 8 bits (`dgpp_core.formats.cache_rows.SCALE_BYTES`, which needs torch)."""


def _vector(name: str, target: str, size: int) -> Binding:
    return Binding(name=name, shape=(size,), target=target, role="vector", init=Init(std=0.2, mean=1.0))


class _Tables:
    """Bindings of one config, part by part."""

    def __init__(self, config: Mimo26Config) -> None:
        self.c = config

    def matrix(
        self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None, grids: int = 1
    ) -> Binding:
        """A matrix in whatever form the checkpoint has it; ``grids`` where that form has blocks."""
        storage = self.c.quantisation.of(module)
        grids = grids if storage == "fp8_block" else 1
        init = Init(std=shape[1] ** -0.5)
        return Binding(
            name=f"{module}.weight", shape=shape, target=target, cut=cut, init=init, storage=storage, grids=grids
        )

    def dense(self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None) -> Binding:
        """A matrix that no release quantises."""
        return Binding(name=f"{module}.weight", shape=shape, target=target, cut=cut, init=Init(std=shape[1] ** -0.5))

    def layer(self, index: int) -> Iterator[Binding]:
        """A decoder layer."""
        name, to, c = f"model.layers.{index}", f"layers.{index}", self.c
        yield _vector(f"{name}.input_layernorm.weight", f"{to}.attention_norm", c.hidden_size)
        yield from self.attention(f"{name}.self_attn", to, windowed=c.windowed[index])
        yield _vector(f"{name}.post_attention_layernorm.weight", f"{to}.mlp_norm", c.hidden_size)
        if c.sparse[index]:
            yield from self.mixture(f"{name}.mlp", to)
        else:
            yield from self.feed_forward(f"{name}.mlp", to, c.intermediate_size)

    def attention(self, name: str, to: str, *, windowed: bool) -> Iterator[Binding]:
        """Ranks take whole chunks of the fused projection, and with them whole heads."""
        c, heads = self.c, self.c.window if windowed else self.c.whole
        yield self.matrix(f"{name}.qkv_proj", (heads.rows, c.hidden_size), f"{to}.qkv", cut=0, grids=c.chunks)
        if windowed:
            yield Binding(
                name=f"{name}.attention_sink_bias", shape=(heads.count,), target=f"{to}.sinks", role="vector", cut=0,
                init=Init(std=1.0, mean=1.0),
            )  # fmt: skip
        yield self.matrix(f"{name}.o_proj", (c.hidden_size, heads.count * heads.value_width), f"{to}.o", cut=1)

    def feed_forward(self, name: str, to: str, size: int) -> Iterator[Binding]:
        """Gate over up, and down: a dense layer, or one expert to be stacked with the others."""
        hidden = self.c.hidden_size
        for part in ("gate", "up"):
            yield self.matrix(f"{name}.{part}_proj", (size, hidden), f"{to}.gate_up", cut=0)
        yield self.matrix(f"{name}.down_proj", (hidden, size), f"{to}.down", cut=1)

    def mixture(self, name: str, to: str) -> Iterator[Binding]:
        """Router and experts."""
        c = self.c
        yield self.dense(f"{name}.gate", (c.n_routed_experts, c.hidden_size), f"{to}.router")
        yield Binding(
            name=f"{name}.gate.e_score_correction_bias", shape=(c.n_routed_experts,), target=f"{to}.router_bias",
            role="vector", formats=("F32",), init=Init(std=0.01),
        )  # fmt: skip
        for expert in range(c.n_routed_experts):
            yield from self.feed_forward(f"{name}.experts.{expert}", f"{to}.experts", c.moe_intermediate_size)

    def draft(self, block: int) -> Iterator[Binding]:
        """A multi-token-prediction block; embedding and head are the target's."""
        name, to, hidden = f"model.mtp.layers.{block}", f"draft.{block}", self.c.hidden_size
        yield _vector(f"{name}.enorm.weight", f"{to}.embedding_norm", hidden)
        yield _vector(f"{name}.hnorm.weight", f"{to}.hidden_norm", hidden)
        yield self.dense(f"{name}.eh_proj", (hidden, 2 * hidden), f"{to}.mix")
        yield _vector(f"{name}.input_layernorm.weight", f"{to}.attention_norm", hidden)
        yield from self.attention(f"{name}.self_attn", to, windowed=True)
        yield _vector(f"{name}.pre_mlp_layernorm.weight", f"{to}.mlp_norm", hidden)
        yield from self.feed_forward(f"{name}.mlp", to, self.c.intermediate_size)
        yield _vector(f"{name}.final_layernorm.weight", f"{to}.norm", hidden)


IGNORED = (
    "visual.*", "audio_encoder.*", "speech_embeddings.*", "audio_projector.*", "dflash/*", "*.rotary_emb.inv_freq",
)  # fmt: skip
"""Encoders of pictures and sound, and a drafter of another kind, that lie in a release and are not served."""


def bindings(c: Mimo26Config) -> BindingTable:
    """Every tensor of the text model, in the order in which the model and its drafter take their parameters."""
    tables, vocabulary = _Tables(c), (c.vocab_size, c.hidden_size)
    out = [
        Binding(
            name="model.embed_tokens.weight", shape=vocabulary, target="embed", role="embedding", init=Init(std=0.5)
        )
    ]
    for index in range(len(c.windowed)):
        out += tables.layer(index)
    out.append(_vector("model.norm.weight", "norm", c.hidden_size))
    out.append(tables.dense("lm_head", vocabulary, "head", cut=0))
    for block in range(BLOCKS):
        out += tables.draft(block)
    targets = (
        f"layers.{i}.experts.{part}" for i, sparse in enumerate(c.sparse) if sparse for part in ("gate_up", "down")
    )
    stacks = tuple(Stack(target, c.n_routed_experts, c.num_experts_per_tok) for target in targets)
    return BindingTable(tuple(out), IGNORED, stacks=stacks, draft=("draft.*",))


def groups(c: Mimo26Config, world: int, kv_dtype: str = "bf16", drafts: int = BLOCKS) -> tuple[StateGroup, ...]:
    """Keys and values of a rank's heads, those of the draft blocks apart, and hidden states for the blocks that lag.

    Args:
        kv_dtype: ``bf16`` keeps rows as they are computed with, ``fp8`` as `dgpp_core.formats.cache_rows` packs them.
        drafts: most tokens that a step drafts: so many blocks run.

    Raises:
        ConfigError: ``world`` ranks cannot share the chunks, or another ``kv_dtype``.
    """
    if kv_dtype not in ("bf16", "fp8"):
        raise ConfigError(
            "keys and values are not kept in this form", where="engine.kv_dtype", found=kv_dtype, expected="bf16 or fp8"
        )
    dtype: Dtype = "uint8" if kv_dtype == "fp8" else "compute"
    scale = SCALE_BYTES if kv_dtype == "fp8" else 0
    if c.chunks % world:
        raise ConfigError(
            "the chunks of the fused projection cannot be divided among the ranks",
            where="world_size",
            found=str(world),
            expected=f"a divisor of num_key_value_heads, {c.chunks}",
        )

    def rings(name: str, layers: int, heads: Heads) -> Iterator[WindowGroup]:
        for part, width in (("k", heads.width), ("v", heads.value_width)):
            yield WindowGroup(
                name=f"{name}_{part}", layers=layers, heads=heads.kv // world, width=width + scale,
                window=c.window_rows, dtype=dtype,
            )  # fmt: skip

    windowed, heads = sum(c.windowed), c.whole.kv // world
    whole = (("k", c.whole.width), ("v", c.whole.value_width))
    return (
        *(
            PagedGroup(name=name, layers=len(c.windowed) - windowed, heads=heads, width=width + scale, dtype=dtype)
            for name, width in whole
        ),
        *(rings("window", windowed, c.window) if windowed else ()),
        *rings("draft", drafts, c.window),
        WindowGroup(name="draft_hidden", layers=1, heads=1, width=c.hidden_size, window=BLOCKS, dtype="compute"),
    )
