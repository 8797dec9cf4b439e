"""The tokens of a model as the grammar library knows them."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NoReturn

import llguidance
import numpy as np
from numpy.typing import NDArray

from dgpp_core.api.errors import EngineError
from dgpp_core.text.grammar.frames import control_tokens
from dgpp_core.text.grammar.limits import MAX_ALTERNATIVES, REMEMBERED, limits
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.tokenizer import Tokenizer

_PLACE = re.compile(r"^(at )?[0-9]+\([0-9]+\): ")
_COPY = re.compile(r"\n *[0-9]+ \||<(?:state|backtrace|grammar|non-verbose)\b")

Words = NDArray[np.int32]
"""A mask: token i is bit i % 32 of word i // 32."""


class Vocabulary:
    """The tokens of a model, made once.

    Control tokens (added tokens that are not white space) are no text: they are allowed only where a grammar names
    them by id.

    Args:
        pieces: bytes of each id.
        control: ids of control tokens.
        silent: ids that a reply shows nothing of.
        width: rows of the model's output head; ids beyond ``pieces`` are never allowed.
        end: an id that ends a reply.
    """

    def __init__(
        self, pieces: Sequence[bytes], control: frozenset[int], silent: frozenset[int], width: int, end: int
    ) -> None:
        self.pieces = tuple(pieces[:width]) + (b"",) * (width - len(pieces))
        self.silent, self.width, self.end = silent, width, end
        self.words = (width + 31) // 32
        wrapper = llguidance.TokenizerWrapper(_Source(self.pieces, sorted(control), end))
        self._tokens = llguidance.LLTokenizer(wrapper, eos_token=end)
        self._lock = threading.Lock()
        self._parsers: OrderedDict[tuple[str, int], llguidance.LLMatcher] = OrderedDict()
        self._ids: dict[bytes, int] = {}
        self._containing: dict[bytes, list[int]] = {}
        self._reasoning: dict[tuple[str, int], Words] = {}

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int, end: int) -> Vocabulary:
        """The vocabulary of ``tokenizer``."""
        pieces = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        silent = frozenset(token for token in range(len(pieces)) if tokenizer.is_special(token))
        return cls(pieces, frozenset(control_tokens(tokenizer)) | {end}, silent, width, end)

    def parser(self, source: str, max_alternatives: int = MAX_ALTERNATIVES) -> llguidance.LLMatcher:
        """A parser at the start of a grammar, which is to be copied and not changed. The latest are kept.

        Raises:
            GrammarError: the source is malformed, too large or matches nothing.
        """
        key = (source, max_alternatives)
        with self._lock:
            parser = self._parsers.pop(key, None)
        if parser is None:
            parser = llguidance.LLMatcher(self._tokens, source, log_level=0, limits=limits(max_alternatives))
            if parser.is_error():
                raise GrammarError(reason(parser))
        with self._lock:
            self._parsers[key] = parser
            if len(self._parsers) > REMEMBERED:
                self._parsers.popitem(last=False)
        return parser

    def empty(self, rows: int) -> NDArray[np.int32]:
        """Zeroed masks, int32 ``[rows, words]``."""
        return np.zeros((rows, self.words), dtype=np.int32)

    def id_of(self, piece: bytes) -> int:
        """The first id of a token with these bytes, or -1."""
        if piece not in self._ids:
            self._ids[piece] = self.pieces.index(piece) if piece and piece in self.pieces else -1
        return self._ids[piece]

    def longest_in(self, text: bytes) -> int:
        """The token that begins a text with most of its bytes and is shown, or -1."""
        found = (self.id_of(text[:size]) for size in range(len(text), 0, -1))
        return next((token for token in found if token >= 0 and token not in self.silent), -1)

    def text(self, token: int, closer: bytes) -> bytes:
        """What ``token`` adds to reasoning that ``closer`` ends."""
        piece = self.pieces[token] if 0 <= token < self.width else b""
        return piece if piece == closer or token not in self.silent else b""

    def while_reasoning(self, closer: str, seen: int, barred: Sequence[int]) -> Words:
        """The mask inside reasoning: everything but ``barred`` and tokens that would close it and go on in one.

        Args:
            seen: bytes of ``closer`` that the reply has come to last.
        """
        key = (closer, seen)
        if key not in self._reasoning:
            mark = closer.encode()
            mask = np.full(self.words, -1, dtype=np.int32)
            for token in self._with_byte(mark[-1:]):
                read = mark[:seen] + self.text(token, mark)
                if mark in read and not read.endswith(mark):
                    clear(mask, token)
            self._reasoning[key] = mask
        mask = self._reasoning[key].copy()
        for token in barred:
            clear(mask, token)
        return mask

    def _with_byte(self, byte: bytes) -> Sequence[int]:
        if byte not in self._containing:
            self._containing[byte] = [token for token, piece in enumerate(self.pieces) if byte in piece]
        return self._containing[byte]


class _Source:
    """What the library reads tokens from."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], end: int) -> None:
        self.tokens, self.special_token_ids = list(tokens), list(special_token_ids)
        self.eos_token_id, self.bos_token_id = end, None

    def __call__(self, text: Any) -> NoReturn:
        """Tokenize; only forced text would be, and no source of ours allows that."""
        raise EngineError("a grammar wants forced text tokenized", found=repr(text), hint="report this as a bug")


def allow(mask: Words, token: int) -> None:
    """Set the bit of ``token``."""
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def clear(mask: Words, token: int) -> None:
    """Clear the bit of ``token``."""
    mask.view(np.uint32)[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)


def allowed(mask: Words, token: int) -> bool:
    """Whether the bit of ``token`` is set."""
    return bool(int(mask[token // 32]) >> (token % 32) & 1)


def reason(parser: llguidance.LLMatcher) -> str:
    """The library's message, without its copy of the grammar and of its own state."""
    error = parser.get_error()
    if error.startswith("panic"):
        return "the grammar library failed"
    text = _PLACE.sub("", _COPY.split(error, maxsplit=1)[0])
    return " ".join(text.split())[:300] or "the library gives no reason"
