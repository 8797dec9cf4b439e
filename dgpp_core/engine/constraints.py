"""The slots whose reply is held to a grammar: their matchers, and the masks of a step's rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.sources import GrammarError, json_object
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary, Words

_log = logging.getLogger(__name__)

THREADS = 4
"""For masks: the library computes without the interpreter's lock."""

COMPILERS = 2
"""Threads in which grammars are compiled ahead; a slow one holds up no masks."""


class Look:
    """The masks of one step on their way.

    Args:
        widths: rows of each slot.
        parts: the masks of each slot, None for one that is free to write anything.
    """

    def __init__(self, widths: Sequence[int], parts: Sequence[Future[Words] | None], device: torch.device) -> None:
        self._widths, self._parts, self._device = widths, parts, device

    def masks(self) -> list[Tensor | None]:
        """One mask a row, int32 ``[ceil(vocab / 32)]`` on the device; waits for what is not there yet."""
        held = [part.result() for part in self._parts if part is not None]
        rows = iter(torch.from_numpy(np.concatenate(held)).to(self._device, non_blocking=True) if held else ())
        return [
            None if part is None else next(rows)
            for part, width in zip(self._parts, self._widths, strict=True)
            for _ in range(width)
        ]


class Constraints:
    """Matchers by slot. Grammars are compiled and masks computed in threads, beside what the device does.

    Args:
        vocabulary: the model's tokens; None where grammars are not offered.
    """

    def __init__(self, vocabulary: Vocabulary | None, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._threads = ThreadPoolExecutor(THREADS, "masks") if vocabulary is not None else None
        self._compilers = ThreadPoolExecutor(COMPILERS, "grammars") if vocabulary is not None else None
        self._slots: dict[int, Future[Matcher]] = {}

    def compile(self, grammar: Grammar) -> Future[object]:
        """Compile a grammar that a request will come with, so that no step waits for it; what comes of it is kept."""
        if self._vocabulary is None or self._compilers is None or not grammar.source:
            done: Future[object] = Future()
            done.set_result(None)
            return done
        return self._compilers.submit(self._vocabulary.parser, grammar.source)

    def begin(self, slot: int, grammar: Grammar | None, replied: Sequence[int]) -> None:
        """A request takes ``slot``; ``replied`` is what it has of its reply already.

        Raises:
            EngineError: there is no vocabulary.
        """
        if grammar is None:
            return
        if self._vocabulary is None or self._threads is None:
            raise EngineError(
                "a request is held to a grammar, but the engine knows no tokens",
                where=f"slot {slot}",
                hint="build the engine with the checkpoint's vocabulary",
            )
        self._slots[slot] = self._threads.submit(_matcher, self._vocabulary, grammar, tuple(replied))

    def release(self, slot: int) -> None:
        """The slot is free."""
        self._slots.pop(slot, None)

    def hold(self, slot: int) -> bool:
        """Whether the slot's reply is held to a grammar."""
        return slot in self._slots

    def look(self, slots: Sequence[int], drafts: Sequence[Sequence[int]] | None = None) -> Look:
        """Begin to compute the masks of a step: for each slot one row, and one behind each of its drafts."""
        drafts = drafts or [()] * len(slots)
        widths = [1 + len(row) for row in drafts]
        return Look(widths, [self._part(slot, row) for slot, row in zip(slots, drafts, strict=True)], self._device)

    def _part(self, slot: int, drafts: Sequence[int]) -> Future[Words] | None:
        made = self._slots.get(slot)
        if made is None or self._threads is None:
            return None
        return self._threads.submit(lambda: made.result().masks(drafts))

    def commit(self, slot: int, tokens: Sequence[int]) -> str:
        """Tokens that now belong to the reply; returns why the grammar cannot be followed any further, if so."""
        made = self._slots.get(slot)
        if made is None:
            return ""
        matcher = made.result()
        matcher.take(tokens)
        return matcher.fault


def _matcher(vocabulary: Vocabulary, grammar: Grammar, replied: tuple[int, ...]) -> Matcher:
    try:
        matcher = Matcher(grammar, vocabulary, vocabulary.parser(grammar.source) if grammar.source else None)
    except Exception as error:  # it was tried before it came here; whatever this is, it is of this request alone
        if not isinstance(error, GrammarError):
            _log.exception("a grammar could not be compiled")
        matcher = Matcher(grammar, vocabulary, vocabulary.parser(json_object()))
        matcher.fault = str(error) or type(error).__name__
    matcher.take(replied)
    return matcher
