"""Ids of tool calls."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property


class CallIds:
    """Names the calls of one request.

    An id depends on the prompt, the seed, the choice and the call's number alone: the same request with the same seed
    gets the same ids, and the turns of one conversation, whose prompts differ, get different ones.
    """

    def __init__(self, prompt: Sequence[int], seed: int) -> None:
        self._prompt, self._seed = prompt, seed

    @cached_property
    def _tag(self) -> bytes:
        return hashlib.blake2b(array("q", self._prompt).tobytes() + self._seed.to_bytes(8, "little")).digest()

    def of(self, choice: int, call: int) -> str:
        """The id of call number ``call`` of a choice."""
        digest = hashlib.blake2b(b"%d %d" % (choice, call), digest_size=8, key=self._tag).hexdigest()
        return f"call_{digest}"
