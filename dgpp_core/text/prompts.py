"""Prompts to ids a message at a time: a turn that is appended to a conversation costs its own text only."""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.text.tokenizer import Tokenizer

KEPT_BYTES = 64 << 20
"""Texts and ids that are kept: about 8 million tokens of English."""

_ENTRY_BYTES = 300
"""What an entry takes beside its text and its ids."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt's ids, and the positions at which one message is over, ascending."""

    ids: list[int]
    turns: tuple[int, ...] = ()


class PromptTokens:
    """Tokenizes rendered prompts and keeps what their parts came to, the latest used. Safe to use from several threads.

    The ids are those of `Tokenizer.encode`, whatever is kept: texts are cut in front of ``marks`` only, where the
    tokenizer cuts them too (`Tokenizer.stands_alone`).

    Args:
        marks: tokens that part messages.
        kept_bytes: what the texts and ids that are kept may take.
    """

    def __init__(self, tokenizer: Tokenizer, marks: Sequence[str], *, kept_bytes: int = KEPT_BYTES) -> None:
        self._tokenizer, self._kept_bytes = tokenizer, kept_bytes
        safe = [mark for mark in marks if tokenizer.stands_alone(mark)]
        self._marks = re.compile("|".join(map(re.escape, safe))) if safe else None
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self.bytes = 0

    def kept(self, part: str) -> bool:
        """Whether the ids of a part of a prompt are there."""
        with self._lock:
            return part in self._kept

    def encode(self, text: str) -> Prompt:
        """The ids of a rendered chat template.

        Raises:
            RequestError: as for `Tokenizer.encode`.
        """
        if self._marks is None:
            return Prompt(self._tokenizer.encode(text))
        cuts = [found.start() for found in self._marks.finditer(text)]
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        ids: list[int] = []
        turns: list[int] = []
        for part in self._parts(parts, text):
            turns.append(len(ids))
            ids.extend(part)
        return Prompt(ids, tuple(turns[1:]))

    def _parts(self, parts: Sequence[str], text: str) -> list[array[int]]:
        """The ids of each part, those that are not known tokenized together."""
        with self._lock:
            found = {part: self._kept[part] for part in parts if part in self._kept}
        missing = [part for part in dict.fromkeys(parts) if part not in found]
        try:
            found |= {
                part: array("I", ids) for part, ids in zip(missing, self._tokenizer.encode_each(missing), strict=True)
            }
        except RequestError:
            self._tokenizer.encode(text)  # which says where in the whole prompt
            raise
        self._keep(parts, found)
        return [found[part] for part in parts]

    def _keep(self, parts: Sequence[str], found: dict[str, array[int]]) -> None:
        with self._lock:
            for part in parts:
                if part in self._kept:
                    self._kept.move_to_end(part)
                elif (size := _size(part, found[part])) <= self._kept_bytes:
                    self._kept[part] = found[part]
                    self.bytes += size
            while self.bytes > self._kept_bytes:
                self.bytes -= _size(*self._kept.popitem(last=False))


def _size(part: str, ids: array[int]) -> int:
    return sys.getsizeof(part) + len(ids) * ids.itemsize + _ENTRY_BYTES
