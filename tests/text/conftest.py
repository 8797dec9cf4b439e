"""A byte-level BPE tokenizer, trained on the spot, and the folder it is loaded from."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers

from dgpp_core.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox thinks; <think> then </think> the end. <br> </b> 3 < 4",
    "안녕하세요 세계, 반갑습니다. 世界你好。龘靐齉爩。 Grüße aus Köln",
    "👩‍👩‍👧‍👦 🧑🏽‍💻 🇰🇷 🙂 def f(x):\n    return x ** 2\n\n\t// tab",
]


def build() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in ("<s>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<tool_call>")])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", start)]
    )
    return backend


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with the files of a tokenizer and a chat template."""
    found = tmp_path_factory.mktemp("checkpoint")
    build().save(str(found / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|im_end|>", "special": True},
        "pad_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": True,
        "added_tokens_decoder": {str(build().token_to_id("<think>")): {"content": "<think>", "special": False}},
        "chat_template": "not this one: chat_template.jinja goes first",
    }
    (found / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    template = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    (found / "chat_template.jinja").write_text(template, encoding="utf-8")
    return found


@pytest.fixture(scope="session")
def backend(folder: Path) -> tokenizers.Tokenizer:
    """The same tokenizer in the library that wrote it."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)
