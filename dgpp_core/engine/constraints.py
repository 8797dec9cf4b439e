"""The slots whose reply is held to a grammar: their matchers, and the masks of a step's rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.sources import GrammarError, json_object
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary, Words

_Work = tuple[Future[Matcher], Sequence[int], Words]
"""A matcher, the drafts to look past, and where the masks go."""

_log = logging.getLogger(__name__)

THREADS = 4
"""For masks, which the library computes without the interpreter's lock."""

ROWS = 16
"""Masks that a thread computes before a second one shares the step: waking it costs as much as a few."""

COMPILERS = 2
"""Threads in which grammars are compiled ahead; a slow one holds up no masks."""


class Look:
    """The masks of one step on their way.

    Args:
        masks: int32 ``[rows, ceil(vocab / 32)]`` on the host, -1 where a row is free to be anything.
        parts: those who still write to it.
    """

    def __init__(self, masks: Tensor, parts: Sequence[Future[None]], device: torch.device) -> None:
        self._masks, self._parts, self._device = masks, parts, device

    def masks(self) -> Tensor:
        """The masks on the device; waits for those that are not there yet."""
        for part in self._parts:
            part.result()
        return self._masks.to(self._device, non_blocking=True)


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

    @property
    def offered(self) -> bool:
        """Whether replies can be held to grammars."""
        return self._vocabulary is not None

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

    def look(self, slots: Sequence[int], drafts: Sequence[Sequence[int]] | None = None) -> Look | None:
        """Begin to compute the masks of a step: for each slot one row, and one behind each of its drafts.

        Args:
            drafts: as many for each slot.

        Returns:
            None where no reply is held to a grammar.
        """
        width = 1 + (len(drafts[0]) if drafts else 0)
        if self._vocabulary is None or self._threads is None or not any(map(self.hold, slots)):
            return None
        shape = (len(slots) * width, self._vocabulary.words)
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        rows, work = masks.numpy(), list[_Work]()
        for at, slot in enumerate(slots):
            if (made := self._slots.get(slot)) is not None:
                work.append((made, drafts[at] if drafts else (), rows[at * width : (at + 1) * width]))
        threads = min(THREADS, -(-len(work) * width // ROWS))
        parts = [self._threads.submit(_write, work[first::threads]) for first in range(threads)]
        return Look(masks, parts, self._device)

    def commit(self, slot: int, tokens: Sequence[int]) -> str:
        """Tokens that now belong to the reply; returns why the grammar cannot be followed any further, if so."""
        made = self._slots.get(slot)
        if made is None:
            return ""
        matcher = made.result()
        matcher.take(tokens)
        return matcher.fault


def _write(work: Sequence[_Work]) -> None:
    for made, drafts, rows in work:
        rows[:] = 0
        made.result().masks(drafts, rows)


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
