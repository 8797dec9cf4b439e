"""Classes of tokens that the n-gram hashes take for one: those whose texts differ in case, accents or spaces alone.

A release does not hold them. They follow from its tokenizer, and are made once: `write_classes` puts them beside the
weights, as the tensor `dgpp_deepseek.deepseek41.tables.SIDECAR`. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dgpp_core.api import CheckpointError, TokenizerError
from dgpp_deepseek.deepseek41.tables import SIDECAR

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "engram_classes.safetensors"
_NO_TEXT = "\N{REPLACEMENT CHARACTER}"


def token_classes(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """The class of each id below ``vocab_size``, numbered in the order of their first token.

    Tokens are of one class whose texts are equal after NFKC, without accents, in lower case, with runs of spaces, tabs
    and line ends as one space, and without space around, save for a text that is nothing but one space. A token that is
    no whole character by itself counts by its symbols in the vocabulary, and one of which nothing is left by its text.
    """
    from tokenizers import Regex, normalizers

    plain = normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
    ])  # fmt: skip
    strip = normalizers.Strip()

    def key(token: int) -> str:
        text = tokenizer.decode([token], skip_special_tokens=False)
        if _NO_TEXT in text:
            return tokenizer.id_to_token(token) or ""
        made: str = plain.normalize_str(text)
        return made if made == " " else strip.normalize_str(made) or text

    numbers: dict[str, int] = {}
    return [numbers.setdefault(key(token), len(numbers)) for token in range(vocab_size)]


def write_classes(folder: Path, vocab_size: int, count: int) -> Path:
    """Make the classes of the checkpoint in ``folder`` and write them there; the file that was written.

    Args:
        vocab_size, count: of config.json, which says how many classes there must be.

    Raises:
        TokenizerError: no tokenizer, or one that gives another number of classes.
        CheckpointError: the folder cannot be written.
    """
    from safetensors.numpy import save
    from tokenizers import Tokenizer

    source = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(source))
    except Exception as error:  # the library raises no class of its own
        raise TokenizerError("cannot load the tokenizer", where=str(source), found=str(error)) from error
    classes = token_classes(tokenizer, vocab_size)
    if (found := max(classes) + 1) != count:
        raise TokenizerError(
            "the tokenizer does not belong to this config.json: its tokens have another number of classes",
            where=str(source), found=str(found), expected=f"{count}, as engram_compressed_vocab_size says",
            hint="fetch or copy the checkpoint again",
        )  # fmt: skip
    path, part = folder / FILE, folder / f"{FILE}.part"
    try:
        part.write_bytes(save({SIDECAR: np.array(classes, dtype=np.int64)}))
        part.replace(path)
    except OSError as error:
        raise CheckpointError(
            "cannot write the classes", where=str(path), found=error.strerror or str(error)
        ) from error
    return path
