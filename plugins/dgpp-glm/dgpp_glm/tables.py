"""The binding tables of GLM models: everything but the attention, which each model adds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dgpp_core.api import Binding, BindingTable, Init, Recoded, Stack
from dgpp_glm.config import GlmConfig

DRAFT_WEIGHTS = "nvfp4"
"""What the draft layer's dense matrices become on a GPU: fewer bytes, and drafts are verified anyway."""

DRAFT_HEAD = "nvfp4"
"""What the output head is read as for drafts on a GPU, a second time: a quarter of the bytes."""


def vector(name: str, target: str, size: int, cut: int | None = None, init: Init | None = None) -> Binding:
    """A norm's weight, or a bias."""
    init = init or Init(std=0.2, mean=1.0)
    return Binding(name=name, shape=(size,), target=target, role="vector", cut=cut, init=init)


class Tables(ABC):
    """Bindings of one config, part by part.

    Attributes:
        shared_apart: the shared expert is a parameter of its own, not the last of the experts' stack: where releases
            store it in another form than they do.
        divisible: the targets whose rows ranks may divide.
        prefix: what the names of a checkpoint's tensors begin with, save the head's.
    """

    shared_apart = False
    divisible: tuple[str, ...] = ()
    prefix = "model"

    def __init__(self, config: GlmConfig) -> None:
        self.c = config

    @abstractmethod
    def attention(self, name: str, to: str, index: int) -> Iterator[Binding]:
        """The attention of a layer; of each model its own."""

    def matrix(
        self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None, draft: bool = False
    ) -> Binding:
        """A matrix in whatever form the checkpoint has it. ``draft``: it is the draft layer's."""
        storage = self.c.quantisation.of(module)
        resident = DRAFT_WEIGHTS if draft and storage == "dense" else ""
        init = Init(std=shape[1] ** -0.5)
        return Binding(
            name=f"{module}.weight", shape=shape, target=target, cut=cut, init=init, storage=storage, resident=resident
        )

    def dense(
        self, module: str, shape: tuple[int, int], target: str, *, cut: int | None = None, draft: bool = False
    ) -> Binding:
        """A matrix that no release quantises. ``draft``: as of `matrix`."""
        init, resident = Init(std=shape[1] ** -0.5), DRAFT_WEIGHTS if draft else ""
        return Binding(name=f"{module}.weight", shape=shape, target=target, cut=cut, init=init, resident=resident)

    def layer(self, index: int) -> Iterator[Binding]:
        """A decoder layer; the draft layer is one too."""
        name, to = f"{self.prefix}.layers.{index}", f"layers.{index}"
        yield vector(f"{name}.input_layernorm.weight", f"{to}.attention_norm", self.c.hidden_size)
        yield from self.attention(f"{name}.self_attn", to, index)
        yield vector(f"{name}.post_attention_layernorm.weight", f"{to}.mlp_norm", self.c.hidden_size)
        if index < self.c.first_k_dense_replace:
            yield from self.feed_forward(f"{name}.mlp", to, self.c.intermediate_size)
        else:
            yield from self.mixture(f"{name}.mlp", to, draft=index == self.c.num_hidden_layers)

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
        for e in range(c.n_routed_experts):
            yield from self.feed_forward(f"{name}.experts.{e}", f"{to}.experts", c.moe_intermediate_size, draft)
        shared = "shared" if self.shared_apart else "experts"
        yield from self.feed_forward(f"{name}.shared_experts", f"{to}.{shared}", c.moe_intermediate_size, draft)

    def draft(self) -> Iterator[Binding]:
        """The multi-token-prediction layer; embedding and head are the target's."""
        name, hidden = f"{self.prefix}.layers.{self.c.num_hidden_layers}", self.c.hidden_size
        yield vector(f"{name}.enorm.weight", "draft.embedding_norm", hidden)
        yield vector(f"{name}.hnorm.weight", "draft.hidden_norm", hidden)
        yield self.dense(f"{name}.eh_proj", (hidden, 2 * hidden), "draft.mix", draft=True)
        yield from self.layer(self.c.num_hidden_layers)
        yield vector(f"{name}.shared_head.norm.weight", "draft.norm", hidden)

    def table(self, *ignored: str) -> BindingTable:
        """Every tensor of the checkpoint, in the order in which the model and its drafter take their parameters.

        Embedding, head, router and ``eh_proj`` are dense in every release; what the others are,
        ``quantization_config`` says.
        """
        c, vocabulary = self.c, (self.c.vocab_size, self.c.hidden_size)
        embed = Binding(
            name=f"{self.prefix}.embed_tokens.weight",
            shape=vocabulary,
            target="embed",
            role="embedding",
            init=Init(std=0.5),
        )
        out = [embed]
        for index in range(c.num_hidden_layers):
            out += self.layer(index)
        out.append(vector(f"{self.prefix}.norm.weight", "norm", c.hidden_size))
        out.append(self.dense("lm_head", vocabulary, "head", cut=0))
        out += self.draft()
        draft = f"{self.prefix}.layers.{c.num_hidden_layers}"
        copies = ("*.rotary_emb.inv_freq", f"{draft}.embed_tokens.weight", f"{draft}.shared_head.head.weight")
        mixtures, beside = range(c.first_k_dense_replace, c.num_hidden_layers + 1), 0 if self.shared_apart else 1
        targets = (f"layers.{i}.experts.{part}" for i in mixtures for part in ("gate_up", "down"))
        return BindingTable(
            tuple(out),
            (*ignored, *copies),
            stacks=tuple(Stack(t, c.n_routed_experts + beside, c.num_experts_per_tok + beside) for t in targets),
            recoded=(Recoded("head", DRAFT_HEAD),),
            draft=("draft.*", f"layers.{c.num_hidden_layers}.*"),
            divisible=self.divisible,
        )
