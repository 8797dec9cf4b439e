"""The checkpoint's tokenizer: text to ids, and the exact bytes of every id.

`tokenizer.json` runs in Hugging Face's `tokenizers`; what that library would accept in silence (ids that it renumbers,
a decoder that does not give the text back) is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from dgpp_core.api.errors import RequestError, TokenizerError
from dgpp_core.text.pieces import is_byte_level, token_bytes_of
from dgpp_core.text.tokenizer_files import (
    PostProcessor,
    TokenizerConfig,
    TokenizerFile,
    read_tokenizer_config,
    read_tokenizer_file,
)

PROBE = (
    "Ab cd  e\n\n\tfoo'll 0123456789 {}[]()<>|/\\_-+=*&^%$#@!~`\"?.,;: \xe9 \xdf \u0416 \u4e16\u754c "
    "\uc548\ub155 \U0001f9d1\u200d\U0001f4bb \ufffd \r\n"
)
"""Text that a tokenizer for a general model must give back unchanged, up to its own normalisation."""


class Tokenizer:
    """A loaded tokenizer. Ids run from 0 to ``vocab_size`` - 1 without a hole.

    Attributes:
        vocab_size: tokens, added ones included; the model's output head may have more rows.
        special_tokens: ``bos_token``, ``eos_token`` and the like, as a chat template sees them.
        chat_template: the checkpoint's own template, if it has one.
        chat_template_file: where that came from, for messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        pieces: Sequence[bytes],
        special_ids: frozenset[int],
        missing_bytes: frozenset[int],
        config: TokenizerConfig,
        *,
        normalizes: bool = True,
    ) -> None:
        self._backend = backend
        self._pieces = tuple(pieces)
        self._special_ids = special_ids
        self._missing_bytes, self._normalizes = missing_bytes, normalizes
        self._added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
        self.vocab_size = len(self._pieces)
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(config.special_tokens))
        self.chat_template = config.chat_template
        self.chat_template_file = config.chat_template_file

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read ``tokenizer.json``, and ``tokenizer_config.json`` and ``chat_template.jinja`` where they exist.

        Raises:
            TokenizerError: naming the file and the field that is missing, malformed or inconsistent.
        """
        path = folder / "tokenizer.json"
        file, raw = read_tokenizer_file(path)
        config = read_tokenizer_config(folder)
        backend = _backend(raw, path)
        _check_added(backend, file, path)
        _check_post_processor(backend, file.post_processor, path)
        _add_configured(backend, config, folder / "tokenizer_config.json")
        added = backend.get_added_tokens_decoder()
        pieces = token_bytes_of(file, {number: token.content for number, token in added.items()}, path)
        special = frozenset(number for number, token in added.items() if token.special)
        single = {piece[0] for piece in pieces if len(piece) == 1}
        missing = frozenset(range(256)) - single if is_byte_level(file) else frozenset()
        normalizes = file.normalizer is not None and file.normalizer.get("normalizers") != []
        loaded = cls(backend, pieces, special, missing, config, normalizes=normalizes)
        loaded._check_named(folder / "tokenizer_config.json")
        loaded._check_round_trip(path, leading_space=not is_byte_level(file))
        return loaded

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered chat template: nothing is added.

        Added tokens are recognised wherever they stand, so one that a user typed into a message becomes the control
        token: template text and user text are one string by then.

        Raises:
            RequestError: the text has a lone surrogate, or a character that the vocabulary cannot spell.
        """
        (ids,) = self._encode([text], add_special_tokens=False)
        return ids

    def encode_each(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each of several texts, on as many threads as the library has.

        Raises:
            RequestError: as for `encode`.
        """
        return self._encode(texts, add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt, with what the tokenizer's post-processor adds (a BOS token, if anything).

        Raises:
            RequestError: as for `encode`.
        """
        (ids,) = self._encode([text], add_special_tokens=True)
        return ids

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        for text in texts:
            self._check(text)
        # Not `encode`: that one keeps other threads out for as long as it takes, which is seconds for a megabyte.
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def _check(self, text: str) -> None:
        try:
            raw = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the prompt is not valid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character "
                f"{error.start}",
                hint="send well-formed text; a surrogate escape in JSON needs its other half",
            ) from error
        if self._missing_bytes and not self._missing_bytes.isdisjoint(raw):
            # The library would leave such a character out without a word.
            lost = next(char for char in text if not self._missing_bytes.isdisjoint(char.encode()))
            raise RequestError(
                f"the model's vocabulary has no token for the character U+{ord(lost):04X}", hint="leave it out"
            )

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that ``token_id`` stands for, a leading space included; ``b""`` outside the vocabulary."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is an added token marked special. ``<think>`` and the like are added but not special."""
        return token_id in self._special_ids

    def is_added(self, token: str) -> bool:
        """Whether ``token`` is an added token, so that it is one id wherever it stands in a text."""
        return token in self._added

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts of all added tokens, special or not."""
        return tuple(self._added)

    def stands_alone(self, token: str) -> bool:
        """Whether every text can be cut in front of ``token`` and tokenized in two parts.

        The library takes added tokens out of a text before all else, the leftmost first and of those the longest, and
        what is between two of them is tokenized by itself. Those that are looked for in normalized text come second,
        between the others. So it is enough that ``token`` is an added one, that no other can lie over a part of it or
        be taken out of its middle before, that it asks nothing of what stands around it, and that it is looked for in
        the text as it is.
        """
        own = self._added.get(token)
        if own is None or own.lstrip or own.single_word or _is_word_or_space(token[0]) or _overlaps(token, token):
            return False
        if own.normalized and self._normalizes:
            return False
        others = [other for other in self._added.values() if other.content != token]
        return not any(
            _covers(other.content, token) or (other.normalized < own.normalized and _breaks(other.content, token))
            for other in others
            if other.normalized <= own.normalized
        )

    def id_of(self, token: str) -> int | None:
        """The id of a token, in the spelling of tokenizer.json."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of whole ``ids``; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(
            self.token_bytes(number) for number in ids if not (skip_special and self.is_special(number))
        ).decode("utf-8", "replace")

    def _check_named(self, path: Path) -> None:
        for name in ("bos_token", "eos_token"):
            token = self.special_tokens.get(name)
            if token is not None and self.id_of(token) is None:
                raise TokenizerError(
                    "a special token is not in the vocabulary",
                    where=f"{path}: {name}",
                    found=repr(token),
                    expected="a token of tokenizer.json",
                    hint="take tokenizer.json and tokenizer_config.json from the same checkpoint",
                )

    def _check_round_trip(self, path: Path, *, leading_space: bool) -> None:
        normalizer = self._backend.normalizer
        try:
            expected = PROBE if normalizer is None else normalizer.normalize_str(PROBE)
            found = self.decode(self._backend.encode(PROBE, add_special_tokens=False).ids, skip_special=False)
            self._backend.encode(PROBE)
        except BaseException as error:
            raise _failure("the tokenizer fails on plain text", path, error) from error
        expected = expected.replace("▁", " ")
        if found not in (expected, " " * leading_space + expected):
            raise TokenizerError(
                "the tokenizer does not give back the text it was given",
                where=f"{path}: normalizer, pre_tokenizer, model or decoder",
                found=repr(found),
                expected=repr(expected),
                hint="compare the file with the one the model was published with",
            )


def _is_word_or_space(char: str) -> bool:
    return char.isalnum() or char == "_" or char.isspace()


def _overlaps(first: str, second: str) -> bool:
    """Whether ``second`` can begin inside ``first`` and end behind it."""
    return any(second.startswith(first[at:]) for at in range(1, len(first)))


def _covers(other: str, token: str) -> bool:
    """Whether ``other``, found first or longer, can have the beginning of ``token`` in it."""
    return token in other or _overlaps(other, token)


def _breaks(other: str, token: str) -> bool:
    """Whether ``other``, looked for before, can take a part of ``token`` away."""
    return other in token or _overlaps(token, other)


def _backend(raw: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_buffer(raw)
    except BaseException as error:
        raise _failure("tokenizer.json cannot be loaded", path, error) from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _failure(what: str, path: Path, error: BaseException) -> BaseException:
    """The library's failure as ours. A panic in its Rust code is no `Exception`, and neither is Ctrl-C."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        return error
    return TokenizerError(
        what,
        where=str(path),
        found=str(error),
        expected="a file that the tokenizers library reads",
        hint="fetch the file again; a newer format may need a newer tokenizers package",
    )


def _check_added(backend: tokenizers.Tokenizer, file: TokenizerFile, path: Path) -> None:
    for index, token in enumerate(file.added_tokens):
        found = backend.token_to_id(token.content)
        if found != token.id:
            raise _misplaced(f"{path}: added_tokens[{index}].id", token.content, token.id, found)


def _check_post_processor(backend: tokenizers.Tokenizer, processor: PostProcessor | None, path: Path) -> None:
    if processor is None:
        return
    for name, token in processor.special_tokens.items():
        found = [backend.token_to_id(content) for content in token.tokens]
        if found != token.ids:
            raise TokenizerError(
                "a token that is added to prompts does not have the id it declares",
                where=f"{path}: post_processor.special_tokens.{name}.ids",
                found=str(token.ids),
                expected=str(found),
                hint="fetch the file again",
            )
    for inner in processor.processors:
        _check_post_processor(backend, inner, path)


def _add_configured(backend: tokenizers.Tokenizer, config: TokenizerConfig, path: Path) -> None:
    for number, token in config.added_tokens:
        if backend.token_to_id(token.content) is None:
            backend.add_tokens([tokenizers.AddedToken(token.content, special=token.special, normalized=False)])
        found = backend.token_to_id(token.content)
        if found != number:
            raise _misplaced(f"{path}: added_tokens_decoder.{number}", token.content, number, found)


def _misplaced(where: str, content: str, declared: int, found: int | None) -> TokenizerError:
    return TokenizerError(
        f"the added token {content!r} does not get the id it declares",
        where=where,
        found="no id" if found is None else f"id {found}",
        expected=f"id {declared}",
        hint="ids must be unique and without holes; fetch the file again",
    )
