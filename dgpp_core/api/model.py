"""The model contract: what a plugin builds and what the engine hands to its forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dgpp_core.formats.matrix import Matrix


class SeenRows(msgspec.Struct, frozen=True, eq=False):
    """Rows of a step that are an image's: what `Seeing.see` made of it, in place of a token's embedding.

    Attributes:
        rows: int64 ``[K]``, ascending.
        values: ``[K, width]``.
    """

    rows: Tensor
    values: Tensor


class StepBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A ragged set of rows: prefill chunks and decode rows alike.

    A *segment* is the run of rows of one request. Shapes: R rows, B segments.

    Attributes:
        tokens: int64 ``[R]``, input ids, segment after segment.
        positions: int64 ``[R]``, absolute position of each row.
        counts: rows of each segment; known on the host, so a captured graph has them fixed.
        slots: int64 ``[B]``, the slot of each segment (index into window and recurrent state).
        lengths: int64 ``[B]``, tokens of each request already in the state before this step.
        block_tables: int64 ``[B, max_blocks]``, block ids of each request's paged rows; unused entries are 0.
        candidates: int64 ``[B]``, which recurrent candidate holds each request's state now.
        keep_rows: True in a verify step: recurrent state is written after every row r to candidate r. Otherwise only
            the state after the segment's last row, to candidate 0.
        max_length: a host-side bound on ``positions + 1``.
        floors: of each segment of a prefill, the position from which on its rows go through every layer and see each
            other there; of those before it a model needs only what later rows read of them, and their hidden states
            mean nothing. Empty: all rows, as in decode steps.
        seen: the rows of images, if there are any; in prefill alone.
        places: int32 ``[slots + 1, 3, positions]``, where rotary embeddings see each position of a slot: time, row and
            column. Only for models whose `Vision.positions` are ``grid``; None stands for the positions themselves.
    """

    tokens: Tensor
    positions: Tensor
    counts: tuple[int, ...]
    slots: Tensor
    lengths: Tensor
    block_tables: Tensor
    candidates: Tensor
    keep_rows: bool
    max_length: int
    seen: SeenRows | None = None
    places: Tensor | None = None
    floors: tuple[int, ...] = ()

    @property
    def uniform(self) -> int | None:
        """Rows a segment where all have the same number, else None."""
        return self.counts[0] if len(set(self.counts)) == 1 else None

    def last_rows(self) -> list[int]:
        """Row index of each segment's last row."""
        ends, total = [], 0
        for count in self.counts:
            total += count
            ends.append(total - 1)
        return ends


State = Mapping[str, "Tensor"]
"""State tensors by group name; layouts in `dgpp_core.api.state`."""


class Bus(Protocol):
    """Collectives among the ranks that share a model. Every rank issues the same ones in the same order.

    Attributes:
        rank: this rank, 0 .. world - 1.
        world: how many ranks there are.
        capturable: collectives on CUDA tensors can be captured into a CUDA graph.
    """

    rank: int
    world: int
    capturable: bool

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum of every rank's ``partial``, folded in rank order so that all ranks get the same bits.

        The parts are widened to float32, added in ascending order of rank and rounded once to the dtype they came in.
        """
        ...

    def all_gather(self, part: Tensor, dim: int) -> Tensor:
        """Every rank's ``part``, concatenated along ``dim`` in rank order."""
        ...

    def barrier(self) -> None:
        """Wait on the host until every rank is here."""
        ...

    def check(self) -> None:
        """Raise `EngineError` if a collective has failed, be it in a kernel: what it should have written is undefined.

        Does not wait. Call it when a result has been read from the device, and before it is used.
        """
        ...


class Weights(Protocol):
    """The checkpoint as the model takes it: cut for this rank, in stored or widened form.

    Every parameter is taken exactly once, by `take` or by `matrix`.
    """

    def take(self, target: str) -> Tensor:
        """The parameter ``target`` as one tensor on the model's device; for whatever is stored dense.

        Raises:
            CheckpointError: it is not in the binding table or was taken before.
        """
        ...

    def matrix(self, target: str) -> Matrix:
        """The matrix of a linear layer in the form the checkpoint stores it in; raises as `take`.

        A dense one has the dtype that `take` would give it.
        """
        ...

    def prepared(
        self, target: str | tuple[str, ...], form: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """A taken parameter in an operation's own form, which the resident image keeps in place of the stored one.

        An operation that reorders or recodes a weight calls this instead of ``make``, and holds on to nothing but the
        result. On a cold start ``make`` is called; from an image the tensors come back and ``make`` is not called. The
        matrix has then only shapes: its tensors are on torch's ``meta`` device.

        Args:
            target: of the parameter, or of those that the form is made of together.
            form: names the layout; another layout needs another name.
            make: from the stored matrix to the tensors of the form, by name.
        """
        ...


class Rows(Protocol):
    """A table ``[N, width]`` of which a step looks rows up, wherever it lies."""

    def __getitem__(self, rows: Tensor) -> Tensor:
        """``[..., width]`` of int64 numbers ``[...]``, in the table's dtype, which may be one of 8 bits.

        On a GPU this is work of the current stream, and can be captured.

        Raises:
            CheckpointError: on a CPU: a row cannot be read from its file. On a GPU it is zero, and the engine hears of
                it before a result is used.
        """
        ...


class Shard(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Where and of what a model is built.

    Attributes:
        device: the torch device.
        dtype: the dtype activations are computed in (float32 on a CPU).
        weights: the checkpoint's parameters.
        bus: this rank's collectives; ``bus.rank`` and ``bus.world`` say which part of each cut tensor it holds.
        bf16_form: how a GPU keeps the BF16 matrices that decoding streams: as they are, or in 12 bits a weight.
        drafting: whether a drafter will be built too.
        pool_ranks: among how many ranks the blocks of paged groups are divided, where a model can: the setting
            ``decode_context_parallel``.
        tables: those that stay in the checkpoint's files, by target; see `BindingTable.lookups`.
    """

    device: torch.device
    dtype: torch.dtype
    weights: Weights
    bus: Bus
    bf16_form: Literal["bf16", "bf12"] = "bf16"
    drafting: bool = True
    pool_ranks: int = 1
    tables: Mapping[str, Rows] = msgspec.field(default_factory=dict)


class Model(Protocol):
    """A target model of one rank."""

    def forward(self, batch: StepBatch, state: State) -> Tensor:
        """Run every row, writing the rows' state; returns the last hidden states, ``[R, hidden_size]``.

        Decode batches are captured into graphs: no host read of a device value when ``batch.uniform`` is set.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Output head: ``[N, hidden_size]`` to float32 ``[N, vocab_size]``."""
        ...


@runtime_checkable
class Seeing(Protocol):
    """What a model has besides `Model` where its plugin has the hook ``dgpp_vision``."""

    def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        """An image of ``rows`` by ``columns`` squares as rows for the model, ``[rows * columns, width]``, in its dtype.

        A row depends on its image alone: one is encoded at a time.

        Args:
            patches: float32, as `dgpp_core.images.patches.patches` cuts them, on the model's device.
        """
        ...


class Drafter(Protocol):
    """Proposes tokens that the target verifies in its next step."""

    depth: int

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: State) -> Tensor:
        """Run the draft layer over the target's rows; row r also knows the token that follows it.

        Args:
            batch: the batch the target just ran.
            hidden: the target's hidden states, ``[R, hidden_size]``.
            next_tokens: int64 ``[R]``, the id at each row's position + 1.

        Returns:
            the drafter's own hidden states, ``[R, hidden_size]``.
        """
        ...

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State) -> Tensor:
        """Draft ``depth`` tokens after each segment's committed end.

        Args:
            batch: one row a segment: the last observed row of each (its position, slot and block table).
            hidden: what `observe` returned for those rows, ``[B, hidden_size]``.
            tokens: int64 ``[B]``, the committed token that follows each of those rows.

        Returns:
            int64 ``[B, depth]``. State written on the way is provisional: it lies past the committed length.
        """
        ...


@runtime_checkable
class Confident(Protocol):
    """What a drafter has besides `Drafter` where it says how sure it is of its drafts."""

    def drafted(
        self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: State
    ) -> tuple[Tensor, Tensor]:
        """What `Drafter.propose` gives, and how likely each of it is to stand if those before it do.

        Returns:
            drafts, and the logits of those probabilities: float32 ``[B, depth]``, with the same bits on every rank.
        """
        ...
