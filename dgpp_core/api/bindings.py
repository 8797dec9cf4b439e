"""The binding table: every tensor a model expects of its checkpoint.

The loader, the memory plan, the random-checkpoint writer and the conformance kit are driven by this one table.
"""

from __future__ import annotations

import fnmatch
from typing import Literal

import msgspec

from dgpp_core.api.errors import ConfigError

Role = Literal["linear", "embedding", "vector"]
"""How a tensor is used: the matrix of a linear layer, a table of rows to look up, or anything kept as it is."""


class Init(msgspec.Struct, frozen=True):
    """How `dgpp synth` fills a tensor: with ``values`` where there are any, else normal, ``std`` around ``mean``."""

    std: float = 0.02
    mean: float = 0.0
    values: tuple[int, ...] = ()


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor or stored matrix of the checkpoint and where it goes.

    Attributes:
        name: the tensor's name in the checkpoint. That of a stored matrix ends in ``.weight`` whatever its tensors
            are called: their names follow from the storage.
        shape: the whole (uncut) shape of the values, ``[N, K]`` of a matrix, not of the tensors that hold them.
        target: the parameter it becomes. Several bindings with one target are concatenated along axis 0 in table
            order (fused query/key/value, gate/up, a layer's experts).
        role: how the parameter is used; decides its resident form and so its bytes in the memory plan.
        cut: the axis that tensor-parallel ranks divide, or None for a copy on every rank.
        fused: along axis 0, where that is cut: the lengths of what the checkpoint has fused into one tensor (queries,
            keys and values). Ranks divide each; a rank's parts are then below each other. Empty: it is one.
        heads: into how many parts the cut axis may be divided, its key/value heads. Further ranks hold what their
            neighbours hold: of two heads and four ranks the first two have the first head. 0: into one a rank.
        formats: the safetensors dtypes accepted for it, where it is stored ``dense``.
        init: how a random checkpoint fills it.
        storage: how the checkpoint stores it; a key of `dgpp_core.formats.storage.STORAGES`.
        source: how the checkpoint stores it where that is not ``storage``. The matrix is then rounded to ``storage`` as
            it is loaded, on every device, and whole: alike for any number of ranks. `BindingTable.for_serving` sets it.
        resident: the storage that a matrix is converted to when it is loaded onto a GPU; empty keeps its own. ``dense``
            is the dtype that activations have.
        grids: a matrix in FP8 blocks may be several of equal height below each other, quantised one by one: the scale
            blocks of each begin at its first row, whether or not its height is a multiple of theirs.
        hint: what to do where a checkpoint lacks it, if no release has it.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    role: Role = "linear"
    cut: int | None = None
    fused: tuple[int, ...] = ()
    heads: int = 0
    formats: tuple[str, ...] = ("F32", "BF16", "F16")
    init: Init = Init()
    storage: str = "dense"
    source: str = ""
    resident: str = ""
    grids: int = 1
    hint: str = ""

    @property
    def stays_float32(self) -> bool:
        """Whether no device narrows it: nothing but F32 is accepted for it (a router's correction bias)."""
        return self.formats == ("F32",)

    @property
    def stays_stored(self) -> bool:
        """Whether it keeps its stored dtype on every device: a table or vector for which one format alone is accepted.

        Constants in integers, a table in 8 bits that is widened as its rows are looked up.
        """
        return self.role != "linear" and self.storage == "dense" and len(self.formats) == 1


class Stack(msgspec.Struct, frozen=True):
    """A target whose matrix is ``entries`` of equal size below each other, each used by itself: a layer's experts.

    ``met``: how many of them a row goes through, the shared ones included.
    """

    target: str
    entries: int
    met: int


class Lookup(msgspec.Struct, frozen=True):
    """A table of which a token needs ``rows`` rows and no more, so that it may stay in the checkpoint's files."""

    target: str
    rows: int


class Recoded(msgspec.Struct, frozen=True):
    """A matrix that a GPU holds a second time in a smaller storage, for where nearly is enough, as in drafting."""

    target: str
    storage: str


class BindingTable(msgspec.Struct, frozen=True):
    """All bindings of a model, and the checkpoint names it knows and does not need.

    Attributes:
        tensors: in the order in which the model takes its parameters.
        ignored: shell-style patterns of checkpoint tensors that are passed over (``*.rotary_emb.inv_freq``).
        shared: pairs (target, target): the second parameter is the first one's data in another resident form
            (a tied output head), so that the plan counts it.
        stacks: the targets that are several matrices used one by one.
        recoded: the targets that a GPU holds a second time, where drafts are made.
        draft: shell-style patterns of the targets that only the drafter takes.
        divisible: the targets whose rows ranks divide where `embed_sharding` is ``vocab``.
        lookups: the tables that stay in the checkpoint's files where `ngram_table` is ``mmap``. A model gets each by
            `dgpp_core.layers.rows.load_rows`.
        on_disk: the bindings that stay there; `for_serving` moves them from ``tensors`` to here.
        roundable: shell-style patterns of the targets whose dense matrices are kept in 8 bits where `dense_weights` is
            ``fp8``.
    """

    tensors: tuple[Binding, ...]
    ignored: tuple[str, ...] = ()
    shared: tuple[tuple[str, str], ...] = ()
    stacks: tuple[Stack, ...] = ()
    recoded: tuple[Recoded, ...] = ()
    draft: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    on_disk: tuple[Binding, ...] = ()
    roundable: tuple[str, ...] = ()

    def for_serving(
        self, *, drafting: bool, divided: bool = False, in_files: bool = False, rounded: bool = False
    ) -> BindingTable:
        """What is taken of it: without drafts, the drafter's tensors are passed over.

        Args:
            divided: see ``divisible``.
            in_files: see ``lookups``.
            rounded: see ``roundable``.

        Raises:
            ConfigError: nothing of it can be divided, stay in files or be rounded.
        """
        table = self._divided() if divided else self
        table = table._in_files() if in_files else table
        table = table._rounded() if rounded else table
        return table if drafting or not table.draft else table._undrafted()

    def _undrafted(self) -> BindingTable:
        def drafts(target: str) -> bool:
            return _matches(target, self.draft)

        left = [binding for binding in self.tensors if drafts(binding.target)]
        names = [name for b in left for name in (b.name, b.name.removesuffix("weight") + "*")]
        return msgspec.structs.replace(
            self,
            tensors=tuple(binding for binding in self.tensors if not drafts(binding.target)),
            ignored=(*self.ignored, *names),
            stacks=tuple(stack for stack in self.stacks if not drafts(stack.target)),
            recoded=(),
        )

    def _rounded(self) -> BindingTable:
        if not self.roundable:
            raise ConfigError(
                "the model keeps dense matrices as the checkpoint has them",
                where="engine.dense_weights",
                found="fp8",
                expected="checkpoint",
            )

        def rounded(binding: Binding) -> Binding:
            if binding.role != "linear" or binding.storage != "dense" or not _matches(binding.target, self.roundable):
                return binding
            return msgspec.structs.replace(binding, storage="fp8_block", source="dense")

        return msgspec.structs.replace(self, tensors=tuple(map(rounded, self.tensors)))

    def _in_files(self) -> BindingTable:
        if not self.lookups:
            raise ConfigError(
                "the model has no table that could stay in the checkpoint's files",
                where="engine.ngram_table",
                found="mmap",
                expected="resident",
            )
        targets = {lookup.target for lookup in self.lookups}
        left = tuple(binding for binding in self.tensors if binding.target in targets)
        return msgspec.structs.replace(
            self,
            tensors=tuple(binding for binding in self.tensors if binding.target not in targets),
            ignored=(*self.ignored, *(binding.name for binding in left)),
            on_disk=left,
        )

    def _divided(self) -> BindingTable:
        if not self.divisible:
            raise ConfigError(
                "the model keeps its embedding whole on every rank",
                where="engine.embed_sharding",
                found="vocab",
                expected="replicated",
            )
        tensors = (msgspec.structs.replace(b, cut=0) if b.target in self.divisible else b for b in self.tensors)
        return msgspec.structs.replace(self, tensors=tuple(tensors))


def _matches(target: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(target, pattern) for pattern in patterns)
