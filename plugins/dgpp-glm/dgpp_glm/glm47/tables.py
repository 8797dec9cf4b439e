"""The binding table and the state groups of GLM-4.7."""

from __future__ import annotations

from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, ConfigError, Init, PagedGroup, Recoded, Stack
from dgpp_glm.glm47.config import Glm47Config

DRAFT_EXPERTS = "nvfp4"
"""What the draft layer's dense experts become on a GPU: a fifth of the memory, and drafts are verified anyway."""

DRAFT_HEAD = "nvfp4"
"""What the output head is read as for drafts on a GPU, a second time: a quarter of the bytes."""


def _vector(name: str, target: str, size: int, cut: int | None = None, init: Init | None = None) -> Binding:
    init = init or Init(std=0.2, mean=1.0)
    return Binding(name=name, shape=(size,), target=target, role="vector", cut=cut, init=init)


class _Tables:
    """Bindings of one config, part by part."""

    def __init__(self, config: Glm47Config) -> None:
        self.c = config

    def matrix(
        self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None, draft: bool = False
    ) -> Binding:
        """A matrix in whatever form the checkpoint has it. ``draft``: an expert of the draft layer."""
        storage = self.c.quantisation.of(module)
        resident = DRAFT_EXPERTS if draft and storage == "dense" else ""
        init = Init(std=shape[1] ** -0.5)
        return Binding(
            name=f"{module}.weight", shape=shape, target=target, cut=cut, init=init, storage=storage, resident=resident
        )

    def dense(self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None) -> Binding:
        """A matrix that no release quantises."""
        return Binding(name=f"{module}.weight", shape=shape, target=target, cut=cut, init=Init(std=shape[1] ** -0.5))

    def layer(self, index: int) -> Iterator[Binding]:
        """A decoder layer; the draft layer is one too."""
        name, to = f"model.layers.{index}", f"layers.{index}"
        yield _vector(f"{name}.input_layernorm.weight", f"{to}.attention_norm", self.c.hidden_size)
        yield from self.attention(f"{name}.self_attn", to)
        yield _vector(f"{name}.post_attention_layernorm.weight", f"{to}.mlp_norm", self.c.hidden_size)
        if index < self.c.first_k_dense_replace:
            yield from self.feed_forward(f"{name}.mlp", to, self.c.intermediate_size)
        else:
            yield from self.mixture(f"{name}.mlp", to, draft=index == self.c.num_hidden_layers)

    def attention(self, name: str, to: str) -> Iterator[Binding]:
        """Queries, keys and values as one parameter, divided by heads."""
        c = self.c
        sizes = {"q": c.num_attention_heads * c.head_dim, "k": c.num_key_value_heads * c.head_dim}
        sizes["v"] = sizes["k"]
        for part, size in sizes.items():
            yield self.matrix(f"{name}.{part}_proj", (size, c.hidden_size), f"{to}.qkv", cut=0)
        for part, size in sizes.items():
            yield _vector(f"{name}.{part}_proj.bias", f"{to}.qkv_bias", size, cut=0, init=Init(std=0.2))
        yield _vector(f"{name}.q_norm.weight", f"{to}.q_norm", c.head_dim)
        yield _vector(f"{name}.k_norm.weight", f"{to}.k_norm", c.head_dim)
        yield self.matrix(f"{name}.o_proj", (c.hidden_size, sizes["q"]), f"{to}.o", cut=1)

    def feed_forward(self, name: str, to: str, size: int, draft: bool = False) -> Iterator[Binding]:
        """Gate over up, and down: a dense layer, or one expert to be stacked with the others."""
        hidden = self.c.hidden_size
        for part in ("gate", "up"):
            yield self.matrix(f"{name}.{part}_proj", (size, hidden), f"{to}.gate_up", cut=0, draft=draft)
        yield self.matrix(f"{name}.down_proj", (hidden, size), f"{to}.down", cut=1, draft=draft)

    def mixture(self, name: str, to: str, draft: bool) -> Iterator[Binding]:
        """Router and experts, the shared one last."""
        c = self.c
        yield self.dense(f"{name}.gate", (c.n_routed_experts, c.hidden_size), f"{to}.router")
        yield Binding(
            name=f"{name}.gate.e_score_correction_bias", shape=(c.n_routed_experts,), target=f"{to}.router_bias",
            role="vector", formats=("F32",), init=Init(std=0.01),
        )  # fmt: skip
        for expert in (*(f"experts.{e}" for e in range(c.n_routed_experts)), "shared_experts"):
            yield from self.feed_forward(f"{name}.{expert}", f"{to}.experts", c.moe_intermediate_size, draft)

    def draft(self) -> Iterator[Binding]:
        """The multi-token-prediction layer; embedding and head are the target's."""
        name, hidden = f"model.layers.{self.c.num_hidden_layers}", self.c.hidden_size
        yield _vector(f"{name}.enorm.weight", "draft.embedding_norm", hidden)
        yield _vector(f"{name}.hnorm.weight", "draft.hidden_norm", hidden)
        yield self.dense(f"{name}.eh_proj", (hidden, 2 * hidden), "draft.mix")
        yield from self.layer(self.c.num_hidden_layers)
        yield _vector(f"{name}.shared_head.norm.weight", "draft.norm", hidden)


def bindings(c: Glm47Config) -> BindingTable:
    """Every tensor of the checkpoint, in the order in which the model and its drafter take their parameters.

    Embedding, head, router and ``eh_proj`` are dense in every release; what the others are, ``quantization_config``
    says. The scales of an 8-bit cache and the draft layer's copies of embedding and head are passed over.
    """
    tables, vocabulary, draft = _Tables(c), (c.vocab_size, c.hidden_size), f"model.layers.{c.num_hidden_layers}"
    out = [
        Binding(
            name="model.embed_tokens.weight", shape=vocabulary, target="embed", role="embedding", init=Init(std=0.5)
        )
    ]
    for index in range(c.num_hidden_layers):
        out += tables.layer(index)
    out.append(_vector("model.norm.weight", "norm", c.hidden_size))
    out.append(tables.dense("lm_head", vocabulary, "head", cut=0))
    out += tables.draft()
    ignored = (
        "*.self_attn.k_proj.k_scale", "*.self_attn.v_proj.v_scale", "*.rotary_emb.inv_freq",
        f"{draft}.embed_tokens.weight", f"{draft}.shared_head.head.weight",
    )  # fmt: skip
    mixtures = range(c.first_k_dense_replace, c.num_hidden_layers + 1)
    targets = (f"layers.{i}.experts.{part}" for i in mixtures for part in ("gate_up", "down"))
    stacks = tuple(Stack(target, c.n_routed_experts + 1, c.num_experts_per_tok + 1) for target in targets)
    recoded = (Recoded("head", DRAFT_HEAD),)
    drafters = ("draft.*", f"layers.{c.num_hidden_layers}.*")
    return BindingTable(tuple(out), ignored, stacks=stacks, recoded=recoded, draft=drafters)


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
