"""A client's own Lark grammars: what is refused, and which rules never end."""

from __future__ import annotations

import time

import pytest

from dgpp_core.text.grammar.endings import endless_rule
from dgpp_core.text.grammar.sources import GrammarError, lark, regex
from dgpp_core.text.grammar.vocabulary import Vocabulary

ENDLESS = {
    'start: "a" start': "start",
    "start: a\na: b\nb: a": "start",
    'start: "x" | a\na: "y" (a | a a)': "a",
    'start: a+\na: "(" a ")"': "start",
    'start: "x"\nspare: spare "y"': "spare",
    'start: a~2..3\na: a "x"': "start",
    'start: a{2}\na: a "x"': "start",
}
ENDING = [
    'start: "a" start | "b"',
    'start: "(" start? ")"',
    'start: a*\na: "x" | "(" a ")" | [a] "y"',
    'start: item ("," item)* -> list\nitem: WORD // a: a\nWORD: /[a:]+/\n%ignore " "',
    'start: a~0..3 "x"\na: "y"',
    'start: a{0,2} "x"\na: a "y" | "z"',
    '?start: _x | y_z\n_x: "a: b"\ny_z: /\\/:/ # z: z',
    "%import common.WS\n%ignore WS\nstart: NAME\nNAME: /[a-z]+/",
]
FOREIGN = [
    "start: <|end|>", "start: <[5]>", 'start[max_tokens=3]: "a"', "start: %json {}", "%llguidance {}\nstart: WORD",
    'start.2: "a"', "start: @other", 'start: a\n%regex { "x": 1 }\na: "b"', 'start: p::0x0\np::_: "" %if true',
]  # fmt: skip


@pytest.mark.parametrize("definition", ENDLESS)
def test_a_rule_without_a_finite_text_is_named(definition: str) -> None:
    assert endless_rule(definition) == ENDLESS[definition]
    with pytest.raises(GrammarError, match=ENDLESS[definition]):
        lark(definition)


def test_many_rules_take_no_time() -> None:
    chain = [f"r{n}: r{n - 1}" for n in range(1, 4000)]
    started = time.monotonic()
    with pytest.raises(GrammarError, match="no finite text"):
        lark("\n".join(["start: r3999", 'r0: "x"', *chain]))
    lark("\n".join(["start: r3999", *reversed(chain), 'r0: "x"']))
    with pytest.raises(GrammarError, match="larger"):
        lark('start: "' + "x" * 70_000 + '"')
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("definition", ENDING)
def test_rules_that_end_compile(vocabulary: Vocabulary, definition: str) -> None:
    assert endless_rule(definition) is None
    vocabulary.parser(lark(definition))


@pytest.mark.parametrize("definition", FOREIGN)
def test_what_is_no_plain_lark_is_refused(definition: str) -> None:
    with pytest.raises(GrammarError, match="not supported"):
        lark(definition)


def test_what_looks_foreign_inside_of_literals_is_text(vocabulary: Vocabulary) -> None:
    parser = vocabulary.parser(lark('start: "<|end|>%json@x" /[<@%]+/ // <x>')).deep_copy()
    text = list(b"<|end|>%json@x<@%")
    assert parser.try_consume_tokens(text) == len(text)


@pytest.mark.parametrize(("pattern", "text"), [("a/b", b"a/b"), (r"a\/b", b"a/b"), ("a\nb", b"a\nb"), (r"\\", b"\\")])
def test_patterns_between_slashes(vocabulary: Vocabulary, pattern: str, text: bytes) -> None:
    parser = vocabulary.parser(regex(pattern)).deep_copy()
    assert parser.try_consume_tokens(list(text)) == len(text)
    assert parser.is_accepting()


def test_patterns_that_are_none() -> None:
    for pattern in ("", "a\\"):
        with pytest.raises(GrammarError):
            regex(pattern)
