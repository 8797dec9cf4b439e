"""A reply in the making, held to its grammar: which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance

from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary, Words, allow, allowed, clear, reason

LEADING_SPACE = 16
"""White space that may come before a model opens reasoning, in bytes; the reader of replies allows as much."""


class _Place:
    """Where in the reply a matcher is, but for the parser.

    Attributes:
        seen: inside reasoning, how much of the closing marker the reply has come to last; -1 in the content.
        left: tokens of reasoning until its closer has to come; -1 for any number.
        space: while the model may still open reasoning, how much white space has come; else -1.
        ended: an end has come.
    """

    __slots__ = ("ended", "left", "seen", "space")

    def __init__(self, seen: int, space: int, left: int, ended: bool = False) -> None:
        self.seen, self.space, self.left, self.ended = seen, space, left, ended

    def copy(self) -> _Place:
        return _Place(self.seen, self.space, self.left, self.ended)


class Matcher:
    """One reply's matcher. A mask is a pure function of the grammar, the vocabulary and the tokens that were taken.

    Args:
        parser: at the start of the grammar; it is not changed. None where the content may be anything.

    Attributes:
        fault: why the grammar cannot be followed any further, if so; from then on only the ends are allowed, and
            the reply must not be taken for a complete one.
    """

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, parser: llguidance.LLMatcher | None) -> None:
        self._grammar, self._vocabulary = grammar, vocabulary
        self._start = parser
        self._parser = parser.deep_copy() if parser is not None else None
        self._parsed: list[int] = []
        self._closer = grammar.closer.encode()
        self._opener = vocabulary.id_of(grammar.opener.encode()) if grammar.start == "either" else -1
        inside, may_open = grammar.start == "reasoning", self._opener >= 0
        self._place = _Place(0 if inside else -1, space=0 if may_open else -1, left=grammar.budget)
        self.fault = ""

    @property
    def complete(self) -> bool:
        """Whether the reply may end here."""
        accepting = self._parser is None or self._parser.is_accepting()
        return self._place.ended or (self._place.seen < 0 and not self.fault and accepting)

    def take(self, tokens: Sequence[int]) -> None:
        """Tokens that are now part of the reply. One that no mask allowed is a `fault`."""
        for token in tokens:
            if not self.fault and not self._take(token):
                broken = self._parser is not None and self._parser.is_error()
                said = reason(self._parser) if self._parser is not None and broken else ""
                self.fault = said or f"token {token} does not continue the grammar"

    def masks(self, drafts: Sequence[int] = (), rows: Words | None = None) -> Words:
        """Which tokens may come next, and after each of ``drafts``.

        Args:
            rows: zeros to write to; by default an array of their own.

        Returns:
            int32 ``[1 + drafts, words]``. Rows behind a draft that is not allowed allow everything: nothing that is
            picked there can stand.
        """
        rows = self._vocabulary.empty(1 + len(drafts)) if rows is None else rows
        self.fault = self.fault or self._fill(rows[0])
        if self.fault:
            self._only_ends(rows[0])
        kept, history, parsed = self._place.copy(), self._parsed, len(self._parsed)
        for at, draft in enumerate(drafts):
            known = 0 <= draft < self._vocabulary.width
            if self.fault or not known or not allowed(rows[at], draft):
                rows[at + 1 :] = -1
                break
            if not self._take(draft) or self._fill(rows[at + 1]):
                # Known of the reply only if it comes here: then the next look at it says so.
                self._only_ends(rows[at + 1])
                rows[at + 2 :] = -1
                break
        self._go_back(kept, history, parsed)
        return rows

    def _go_back(self, place: _Place, history: list[int], parsed: int) -> None:
        same, extra = self._parsed is history, len(self._parsed) - parsed
        del history[parsed:]
        self._place, self._parsed = place, history
        if self._parser is None or self._start is None:
            return
        lost = not same or self._parser.is_error() or (extra > 0 and not self._parser.rollback(extra))
        if lost and not self.fault:
            self._parser = self._start.deep_copy()
            self._parser.consume_tokens(history)

    def _fill(self, row: Words) -> str:
        """Write the mask; returns why there is none, if so."""
        ends, place = self._grammar.ends, self._place
        if place.seen >= 0:
            if (closing := self._closing()) >= 0:
                allow(row, closing)
            elif self._parser is None:
                row[:] = -1
            else:
                barred = (*ends, *self._grammar.barred)
                row[:] = self._vocabulary.while_reasoning(self._grammar.closer, place.seen, barred)
            return ""
        if self._parser is None:
            row[:] = -1
            return ""
        if not place.ended:
            self._parser.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._parser.is_error():
                return reason(self._parser)
            clear(row, self._vocabulary.end)
        if self.complete:
            for token in ends:
                allow(row, token)
        if place.space >= 0:
            allow(row, self._opener)
        return "" if row.any() else "nothing can follow"

    def _closing(self) -> int:
        """The token that has to come to close reasoning: the marker's own, or the longest that spells what is left.

        -1 where the budget is not spent.
        """
        if self._place.left != 0:
            return -1
        marker = self._vocabulary.id_of(self._closer)
        return marker if marker >= 0 else self._vocabulary.longest_in(self._closer[self._place.seen :])

    def _only_ends(self, row: Words) -> None:
        row[:] = 0
        for token in self._grammar.ends:
            allow(row, token)

    def _take(self, token: int) -> bool:
        """Whether ``token`` continues the reply; if so it is part of it."""
        place = self._place
        space, place.space = place.space, -1
        if place.ended:
            return True
        if place.seen >= 0:
            if (closing := self._closing()) >= 0 and token != closing:
                return False
            place.left -= place.left > 0
            self._reason(self._vocabulary.text(token, self._closer))
            return True
        if space >= 0 and token == self._opener:
            place.seen = 0
            if self._parsed and self._start is not None:  # white space in front of reasoning is no part of the content
                self._parser, self._parsed = self._start.deep_copy(), []
            return True
        if self._parser is None:
            place.space = self._still_space(space, token)
            return True
        if token in self._grammar.ends and self._parser.is_accepting():
            place.ended = True
            return True
        taken = not self._parser.is_error() and self._parser.try_consume_tokens([token]) == 1
        if taken:
            self._parsed.append(token)
            place.space = self._still_space(space, token)
        return taken

    def _still_space(self, space: int, token: int) -> int:
        piece = self._vocabulary.pieces[token]
        return space + len(piece) if space >= 0 and piece.isspace() and space + len(piece) <= LEADING_SPACE else -1

    def _reason(self, text: bytes) -> None:
        """Reasoning goes on by ``text``, or ends with it."""
        mark = self._closer
        read = mark[: self._place.seen] + text
        if mark in read:
            self._place.seen = -1
            return
        self._place.seen = next(size for size in range(len(mark) - 1, -1, -1) if read.endswith(mark[:size]))
