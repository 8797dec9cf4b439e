"""The sampler: state of each slot, and the picks of one step.

Every row is decided alone, by operations whose shapes do not depend on the other rows, so a pick depends on the row's
logits, the request's parameters and history, and the position: not on the slot, the batch or the speculation depth.

Speculation needs no rule of its own. A verify row is picked with the draw of its own position; a draft stands iff it
equals that pick. So a deterministic draft is accepted with the probability that the model gives it, and the tokens
are those of plain decoding with the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.errors import EngineError, RequestError
from dgpp_core.ops.pick import greedy
from dgpp_core.sampling.device import greedy_row, sampled_row
from dgpp_core.sampling.draw import Choice, draw
from dgpp_core.sampling.logprobs import TokenLogprobs
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.sampling.random import uniform
from dgpp_core.sampling.shape import shape
from dgpp_core.sampling.validate import validate

_UNFILTERED = SamplingParams()


class Picks(msgspec.Struct, frozen=True, eq=False):
    """Picked tokens, int64 [rows] on the sampler's device, and each row's logprobs where its request wants them."""

    tokens: Tensor
    logprobs: tuple[TokenLogprobs | None, ...]


class _Slot(msgspec.Struct, frozen=True, eq=False):
    """A request's sampling state: ``counts`` int32 [vocab] with penalties, ``bias`` ids [k] and values [k]."""

    params: SamplingParams
    logprobs: int
    counts: Tensor | None
    bias: tuple[Tensor, Tensor] | None

    @property
    def shaped(self) -> bool:
        return self.counts is not None or self.bias is not None

    @property
    def plain(self) -> bool:
        return self.params.temperature == 0 and self.logprobs < 0 and not self.shaped


class Sampler:
    """Picks tokens for the requests that hold a slot.

    Args:
        vocab_size: width of a row of logits.
        slots: slots are 0 .. slots - 1.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, slots: int, device: torch.device) -> None:
        self._vocab_size, self._slot_count, self._device = vocab_size, slots, device
        self._slots: dict[int, _Slot] = {}

    @staticmethod
    def bytes_planned(vocab_size: int, slots: int) -> int:
        """Most device bytes that the slots' token counts take; a slot without penalties takes none."""
        return slots * vocab_size * torch.int32.itemsize

    def begin(self, slot: int, params: SamplingParams, prompt: Sequence[int], logprobs: int) -> None:
        """A request takes ``slot``; ``logprobs`` alternatives a token, -1 for no logprobs.

        Raises:
            RequestError: a parameter or a prompt id is out of range; the slot stays free.
            EngineError: there is no such slot, or it is taken.
        """
        if not 0 <= slot < self._slot_count or slot in self._slots:
            raise EngineError(
                "a request cannot take the slot",
                where=f"slot {slot}",
                found="taken" if slot in self._slots else "no such slot",
                expected=f"a free slot of 0 to {self._slot_count - 1}",
                hint="release a slot before it is used again",
            )
        validate(params, self._vocab_size)
        counts = self._count(prompt, None) if params.penalised else None
        self._slots[slot] = _Slot(params, logprobs, counts, self._bias(params))

    def device_row(self, slot: int) -> list[int] | None:
        """The slot's row of the device's table (`dgpp_core.sampling.device`); None where the host has to pick.

        Raises:
            EngineError: the slot is free.
        """
        state = self._state(slot)
        if state.shaped or state.logprobs >= 0:
            return None
        return greedy_row() if state.plain else sampled_row(state.params, self._vocab_size)

    def release(self, slot: int) -> None:
        """Drop the slot's state, if it has any."""
        self._slots.pop(slot, None)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Tokens that now belong to the slot's output."""
        counts = self._state(slot).counts
        if counts is not None:
            self._count(tokens, counts)

    def pick(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> Picks:
        """One token a row. The slots' state is not changed: `commit` what is kept.

        Args:
            logits: float32 [rows, vocab]; a token that does not exist has -inf.
            slots: the slot that a row belongs to; several rows may share one.
            positions: the absolute position at which a row's token will stand.
            drafts: tokens that a row takes for granted after the committed ones.

        Raises:
            EngineError: shapes differ, a slot is free, or a row has no finite logit or holds NaN or +inf.
        """
        rows = len(slots)
        self._check_shapes(logits, rows, positions, drafts)
        best, sound = greedy(logits)
        tokens: list[int] = best.tolist()
        logprobs: list[TokenLogprobs | None] = [None] * rows
        for row, fine in enumerate(sound.tolist()):
            if not fine:
                peak = float(logits[row].amax())
                raise _not_finite(peak, "the logits have no finite largest value", slots[row], positions[row])
            state = self._state(slots[row])
            if state.plain:
                continue
            choice = self._choose(state, logits[row], slots[row], positions[row], drafts[row] if drafts else ())
            tokens[row], logprobs[row] = choice.token, choice.logprobs
        return Picks(torch.tensor(tokens, dtype=torch.int64, device=self._device), tuple(logprobs))

    def _choose(self, state: _Slot, logits: Tensor, slot: int, position: int, drafts: Sequence[int]) -> Choice:
        counts = state.counts
        if counts is not None and drafts:
            counts = self._count(drafts, counts.clone())
        row = shape(logits, state.params, counts, state.bias)
        if not math.isfinite(peak := float(row.amax())):
            raise _not_finite(peak, "no token is left to choose from", slot, position)
        if state.params.temperature > 0:
            return draw(row, state.params, uniform(state.params.seed, position), state.logprobs)
        if state.logprobs < 0:
            return Choice(int(row.argmax()), None)
        return draw(row, _UNFILTERED, 0.0, state.logprobs)

    def _state(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise EngineError(
                "the sampler was asked about a free slot",
                where=f"slot {slot}",
                expected=f"one of {sorted(self._slots)}",
                hint="begin the request first",
            )
        return state

    def _count(self, tokens: Sequence[int], counts: Tensor | None) -> Tensor:
        """``counts``, or none yet, with the occurrences added: int32 [vocab]."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(wrong):
            raise RequestError(
                f"token id {int(wrong[0])} is outside the vocabulary of {self._vocab_size}",
                code="invalid_parameter",
            )
        if counts is None:
            counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        ones = torch.ones(len(ids), dtype=torch.int32, device=self._device)
        return counts.index_add_(0, ids.to(self._device), ones)

    def _bias(self, params: SamplingParams) -> tuple[Tensor, Tensor] | None:
        if not params.logit_bias:
            return None
        ids, values = zip(*params.logit_bias, strict=True)
        return (
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(values, dtype=torch.float64, device=self._device),
        )

    def _check_shapes(self, logits: Tensor, rows: int, *sequences: Sequence[object] | None) -> None:
        lengths = [len(sequence) for sequence in sequences if sequence is not None]
        if logits.shape != (rows, self._vocab_size) or logits.dtype != torch.float32 or set(lengths) - {rows}:
            raise EngineError(
                "the rows to pick from do not fit together",
                found=f"logits {logits.dtype} {list(logits.shape)}, {rows} slots, other arguments {lengths}",
                expected=f"logits torch.float32 [{rows}, {self._vocab_size}] and {rows} of each argument",
                hint="pass one slot, position and draft list a row",
            )


def _not_finite(peak: float, what: str, slot: int, position: int) -> EngineError:
    return EngineError(
        what,
        where=f"slot {slot}, position {position}",
        found=str(peak),
        expected="at least one finite logit, no NaN and no +inf",
        hint="check the model's weights and kernels, and the mask if there is one",
    )
