"""Tokenizer and chat template of a random checkpoint: one token a byte, two control tokens, and words to fill up."""

from __future__ import annotations

import json
from itertools import islice, product
from string import ascii_lowercase

from dgpp_core.api.errors import ConfigError

START, END = "<|im_start|>", "<|im_end|>"
CONTROL = (START, END)
SMALLEST_VOCABULARY = 256 + len(CONTROL)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def token_id(control: str) -> int:
    """Id of a control token: they follow the 256 bytes."""
    return 256 + CONTROL.index(control)


def text_files(vocab_size: int) -> dict[str, str]:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja, as text by file name.

    Raises:
        ConfigError: ``vocab_size`` is below `SMALLEST_VOCABULARY`.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            "the vocabulary is too small for a byte-level tokenizer",
            where="config.json, vocab_size",
            found=str(vocab_size),
            expected=f"at least {SMALLEST_VOCABULARY}",
        )
    return {
        "tokenizer.json": json.dumps(_tokenizer(vocab_size), ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(_tokenizer_config(), indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (the GPT-2 mapping)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _vocabulary(vocab_size: int) -> list[str]:
    """Tokens by id. The words are reached by no merge: a prompt is bytes, a random reply is mostly words."""
    words = ("Ġ" + "".join(letters) for length in range(2, 8) for letters in product(ascii_lowercase, repeat=length))
    return [*byte_symbols(), *CONTROL, *islice(words, vocab_size - SMALLEST_VOCABULARY)]


def _tokenizer(vocab_size: int) -> dict[str, object]:
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id(token), "content": token, **added} for token in CONTROL],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(_vocabulary(vocab_size))},
            "merges": [],
        },
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": START,
        "eos_token": END,
        "additional_special_tokens": list(CONTROL),
    }
