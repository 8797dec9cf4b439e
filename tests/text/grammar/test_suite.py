"""The JSON Schema Test Suite: what it calls invalid is never written, and what cannot be enforced is refused by path.

``narrowed`` marks values that conform and are not written all the same, as the documentation says: properties in
another order than the schema's, integers with a fraction of zero, forms of a format that are left out, and formats
where the suite takes them for annotations.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dgpp_core.testing.grammars import validate, write
from dgpp_core.text.grammar.blame import refused_path
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.schema import SchemaError, check_schema
from dgpp_core.text.grammar.sources import GrammarError, json_value
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary

from .conftest import END

SEEDS = 4


class Group(msgspec.Struct, frozen=True):
    """Cases of a schema: (description, value, verdict). ``refused`` is the path where it cannot be enforced."""

    file: str
    description: str
    schema: Any
    tests: list[tuple[str, Any, str]]
    refused: str | None = None


class Suite(msgspec.Struct, frozen=True):
    """The file, with where it comes from."""

    source: str
    licence: str
    groups: list[Group]


GROUPS = msgspec.json.decode((Path(__file__).parent / "json_schema_test_suite.json").read_bytes(), type=Suite).groups
TAKEN = [group for group in GROUPS if group.refused is None]
REFUSED = [group for group in GROUPS if group.refused is not None]


def by_file(groups: list[Group]) -> Any:
    """A test for each file of the suite."""
    files = sorted({group.file for group in groups})
    parts = [[group for group in groups if group.file == file] for file in files]
    return pytest.mark.parametrize("groups", parts, ids=files)


def test_the_suite_is_whole() -> None:
    assert (len(TAKEN), len(REFUSED)) == (161, 217)
    verdicts = [verdict for group in TAKEN for _, _, verdict in group.tests]
    assert {word: verdicts.count(word) for word in set(verdicts)} == {"valid": 436, "invalid": 364, "narrowed": 45}


@by_file(TAKEN)
def test_values_are_taken_as_the_suite_says(vocabulary: Vocabulary, groups: list[Group]) -> None:
    for group in groups:
        start = vocabulary.parser(json_value(check_schema(group.schema)))
        for description, value, verdict in group.tests:
            raw = json.dumps(value, ensure_ascii=False).encode()
            parser = start.deep_copy()
            taken = parser.try_consume_tokens(list(raw)) == len(raw) and parser.is_accepting()
            assert taken == (verdict == "valid"), f"{group.description}: {description}: {raw!r}"


@by_file(TAKEN)
def test_what_is_written_conforms(vocabulary: Vocabulary, groups: list[Group]) -> None:
    for group in groups:
        source = json_value(check_schema(group.schema))
        start = vocabulary.parser(source)
        for seed in range(SEEDS):
            matcher = Matcher(Grammar(source=source, ends=(END,)), vocabulary, start)
            tokens = write(matcher, vocabulary, [END], random.Random(seed))
            if tokens is not None:
                validate(group.schema, b"".join(vocabulary.pieces[token] for token in tokens))


@by_file(REFUSED)
def test_what_cannot_be_enforced_is_refused_by_path(vocabulary: Vocabulary, groups: list[Group]) -> None:
    def verdict(checked: Any) -> str:
        try:
            vocabulary.parser(json_value(checked))
        except GrammarError as error:
            return str(error)
        return ""

    def path(schema: Any) -> str | None:
        try:
            checked = check_schema(schema)
        except SchemaError as error:
            return error.path
        why = verdict(checked)
        return refused_path(schema, checked, why, verdict) if why else None

    for group in groups:
        assert path(group.schema) == group.refused, group.description
