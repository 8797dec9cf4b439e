"""The tokenizer files of a checkpoint, from the vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dgpp_core.api.errors import CheckpointError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_SPLITS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
}
"""How text is split before the merges, by GGUF's name of the rule."""


class Values(Protocol):
    """A GGUF file's key/value pairs: ``[]`` raises `CheckpointError`, ``get`` gives None."""

    where: str

    def get(self, key: str) -> Any: ...
    def __getitem__(self, key: str) -> Any: ...


def tokenizer_json(meta: Values) -> dict[str, Any]:
    """The content of tokenizer.json.

    Raises:
        CheckpointError: the vocabulary is not byte-level BPE, or is split by a rule that is not known here.
    """
    kind, rule = meta["tokenizer.ggml.model"], meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in _SPLITS:
        raise CheckpointError(
            "the GGUF file's vocabulary is not one this converter knows",
            where=meta.where,
            found=f"model {kind!r}, pre {rule!r}",
            expected="model 'gpt2', pre " + " or ".join(map(repr, _SPLITS)),
        )
    tokens, kinds = _vocabulary(meta)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds),
        "normalizer": None,
        "pre_tokenizer": _SPLITS[rule],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Rows that only pad the embedding are of no listed kind and are no tokens.
            "vocab": {
                token: index
                for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
                if kind in (_NORMAL, _CONTROL, _USER_DEFINED)
            },
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(meta: Values) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens, kinds = _vocabulary(meta)
    added = _added(tokens, kinds)

    def named(role: str) -> str | None:
        index = meta.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token")),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "model_max_length": int(meta[f"{meta['general.architecture']}.context_length"]),
        "additional_special_tokens": [token["content"] for token in added if token["special"]],
        "added_tokens_decoder": {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
        },
    }


def chat_template(meta: Values) -> str | None:
    """The chat template, if the file has one."""
    template = meta.get("tokenizer.chat_template")
    return None if template is None else str(template)


def _vocabulary(meta: Values) -> tuple[Sequence[str], list[int]]:
    """Every token and its kind, by id."""
    return meta["tokenizer.ggml.tokens"], [int(kind) for kind in meta["tokenizer.ggml.token_type"]]


def _added(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **plain, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
