"""The exact bytes of every token, from its spelling in tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dgpp_core.api.errors import TokenizerError
from dgpp_core.text.tokenizer_files import Bpe, TokenizerFile

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NEEDED = (*b"\t\n\r", *range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1))


def token_bytes_of(file: TokenizerFile, added: Mapping[int, str], path: Path) -> list[bytes]:
    """The bytes of ids 0, 1, 2, …: added tokens as UTF-8, the others as the decoder spells them.

    Raises:
        TokenizerError: two tokens have one id, an id has no token, or the decoder is of an unknown kind.
    """
    spell = _speller(file, path)
    spelled: dict[int, bytes] = {}
    for number, piece in _vocabulary(file):
        if number in spelled:
            raise TokenizerError(
                "two tokens have the same id", where=f"{path}: model.vocab", found=f"id {number} again, for {piece!r}",
                expected="one token an id", hint="fetch the file again",
            )  # fmt: skip
        spelled[number] = spell(piece)
    spelled |= {number: content.encode() for number, content in added.items()}
    missing = next((number for number in range(len(spelled)) if number not in spelled), None)
    if missing is not None:
        raise TokenizerError(
            "an id has no token", where=f"{path}: model.vocab", found=f"no token for id {missing}, "
            f"the highest id is {max(spelled)}", expected="ids without a hole", hint="fetch the file again",
        )  # fmt: skip
    return [spelled[number] for number in range(len(spelled))]


def byte_alphabet() -> dict[int, str]:
    """Byte-level BPE's printable stand-in for each byte: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


def _vocabulary(file: TokenizerFile) -> Iterable[tuple[int, str]]:
    if isinstance(file.model, Bpe):
        return ((number, piece) for piece, number in file.model.vocab.items())
    return enumerate(piece for piece, _ in file.model.vocab)


def is_byte_level(file: TokenizerFile) -> bool:
    """Whether tokens are spelled in the byte alphabet, rather than as SentencePiece does."""
    return "ByteLevel" in _kinds(file)


def _speller(file: TokenizerFile, path: Path) -> Callable[[str], bytes]:
    kinds = _kinds(file)
    if is_byte_level(file):
        return _byte_level(file, path)
    if "Metaspace" in kinds or {"Replace", "Fuse"} <= set(kinds):
        return _sentencepiece
    raise TokenizerError(
        "the tokenizer's decoder is of an unknown kind", where=f"{path}: decoder", found=str(kinds),
        expected="ByteLevel, Metaspace, or Replace with ByteFallback and Fuse",
    )  # fmt: skip


def _kinds(file: TokenizerFile) -> list[str]:
    """The types of the decoder's steps; the library has checked their form."""
    decoder = file.decoder
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [str(step.get("type")) for step in steps]


def _byte_level(file: TokenizerFile, path: Path) -> Callable[[str], bytes]:
    alphabet = byte_alphabet()
    vocabulary = {piece for _, piece in _vocabulary(file)}
    missing = [byte for byte in _NEEDED if alphabet[byte] not in vocabulary]
    if missing:
        raise TokenizerError(
            "the byte-level vocabulary lacks bytes of ordinary text", where=f"{path}: model.vocab",
            found="no token for bytes " + " ".join(f"{byte:02x}" for byte in missing[:8]),
            expected="tokens for printable ASCII, white space and the bytes of U+0080 to U+3FFFF",
            hint="fetch the file again",
        )  # fmt: skip
    to_latin = {ord(char): byte for byte, char in alphabet.items()}
    stand_ins = frozenset(alphabet.values())

    def spell(piece: str) -> bytes:
        # A piece with any other character is written out as it is, which is what the library's decoder does.
        return piece.translate(to_latin).encode("latin-1") if stand_ins.issuperset(piece) else piece.encode()

    return spell


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()
