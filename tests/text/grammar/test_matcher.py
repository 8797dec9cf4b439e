"""Masks against brute force, ends, reasoning, drafts and faults."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.spec import Grammar, Start
from dgpp_core.text.grammar.vocabulary import Vocabulary, allowed

from .conftest import CALL, CONTROL, END, END_THINK, PIECES, THINK, TURN, WIDTH

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "number", "minimum": -1.5, "maximum": 30},
        "day": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", 12, None]}},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
SOURCES = {
    "object": sources.json_object(),
    "schema": sources.json_schema(SCHEMA),
    "regex": sources.regex("(ab|abc)*[0-9]{2,4}é?"),
    "lark": sources.lark('start: item ("," item)*\nitem: "ab" | "(" start ")" | /[0-9]+/'),
}


def ids(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def make(vocabulary: Vocabulary, source: str, start: Start = "content", ends: tuple[int, ...] = (END,)) -> Matcher:
    grammar = Grammar(source=source, ends=ends, start=start, opener="<think>", closer="</think>")
    return Matcher(grammar, vocabulary, vocabulary.parser(source))


def brute_force(vocabulary: Vocabulary, source: str, text: bytes) -> set[int]:
    """Tokens whose bytes, one by one, are taken after ``text``, by a parser that knows single bytes alone."""
    bytewise = Vocabulary([bytes([byte]) for byte in range(256)] + [b"<end>"], frozenset({256}), frozenset(), 257, 256)
    before = bytewise.parser(source).deep_copy()
    assert before.try_consume_tokens(list(text)) == len(text)
    found = set()
    for token, piece in enumerate(PIECES):
        if token not in CONTROL and before.deep_copy().try_consume_tokens(list(piece)) == len(piece):
            found.add(token)
    return found | ({END} if before.is_accepting() else set())


@pytest.mark.parametrize("name", SOURCES)
def test_a_mask_is_what_feeding_every_tokens_bytes_gives(vocabulary: Vocabulary, name: str) -> None:
    rng = random.Random(name)
    for _ in range(3):
        matcher, text = make(vocabulary, SOURCES[name]), b""
        for _ in range(14):
            found = ids(matcher.masks()[0])
            assert found == brute_force(vocabulary, SOURCES[name], text)
            assert matcher.complete == (END in found)
            token = rng.choice(sorted(found))
            matcher.take([token])
            if token == END:
                break
            text += PIECES[token]
    assert not matcher.fault


def test_only_ends_come_after_a_complete_reply_and_every_given_end_does(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object(), ends=(END, TURN))
    matcher.take(list(b'{"a":1}'))
    assert matcher.complete
    assert ids(matcher.masks()[0]) == {END, TURN}
    matcher.take([TURN])
    assert ids(matcher.masks()[0]) == {END, TURN}
    other = make(vocabulary, sources.json_object(), ends=(TURN,))
    other.take(list(b"{}"))
    assert ids(other.masks()[0]) == {TURN}


def test_white_space_may_come_first_and_is_bounded(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object())
    for count in range(16):
        assert ord(" ") in ids(matcher.masks()[0]), count
        matcher.take([ord(" ")])
    assert ids(matcher.masks()[0]) == {ord("{"), PIECES.index(b'{"')}
    matcher.take([ord("{"), *b"\n" * 16])
    assert ids(matcher.masks()[0]).isdisjoint(b" \n\t\r")


def test_control_tokens_are_no_text(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_schema({"type": "string"}))
    matcher.take([ord('"')])
    assert ids(matcher.masks()[0]).isdisjoint(CONTROL)
    assert set(b"<call>") <= ids(matcher.masks()[0])


def test_a_grammar_names_control_tokens_by_id(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, f'%llguidance {{"no_forcing": true}}\nstart: <[{CALL}]> "ab"')
    assert ids(matcher.masks()[0]) == {CALL}
    matcher.take([CALL])
    assert ids(matcher.masks()[0]) == {ord("a"), PIECES.index(b"ab")}


@pytest.mark.parametrize("closing", [[END_THINK], list(b"</think>"), [PIECES.index(b"</th"), PIECES.index(b"ink>")]])
def test_the_grammar_starts_where_reasoning_ends_however_it_is_spelled(
    vocabulary: Vocabulary, closing: list[int]
) -> None:
    matcher = make(vocabulary, sources.json_object(), start="reasoning")
    everything = set(range((WIDTH + 31) // 32 * 32)) - {END}
    for token in [*b"so </ then", TURN, *closing[:-1]]:
        assert everything - ids(matcher.masks()[0]) <= {PIECES.index(b"nk>x"), PIECES.index(b"k>\n")}
        assert not matcher.complete
        matcher.take([token])
    matcher.take(closing[-1:])
    assert ord("{") in ids(matcher.masks()[0])
    assert ord("x") not in ids(matcher.masks()[0])


def test_reasoning_has_no_calls(vocabulary: Vocabulary) -> None:
    source = f'%llguidance {{"no_forcing": true}}\nstart: <[{CALL}]> "ab"'
    grammar = Grammar(source=source, ends=(END,), start="reasoning", closer="</think>", barred=(CALL,))
    matcher = Matcher(grammar, vocabulary, vocabulary.parser(source))
    assert {CALL, END}.isdisjoint(ids(matcher.masks()[0]))
    matcher.take([END_THINK])
    assert ids(matcher.masks()[0]) == {CALL}


def test_no_token_closes_reasoning_and_goes_on(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object(), start="reasoning")
    joined = PIECES.index(b"nk>x")
    assert joined in ids(matcher.masks()[0])
    matcher.take(list(b"</thi"))
    assert joined not in ids(matcher.masks()[0])
    assert PIECES.index(b"nk>x") not in ids(matcher.masks()[0])


def test_a_model_may_open_reasoning_itself_but_only_first(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object(), start="either")
    assert {THINK, ord("{")} <= ids(matcher.masks()[0])
    plain = make(vocabulary, sources.json_object(), start="either")
    plain.take([ord("{")])
    assert THINK not in ids(plain.masks()[0])
    matcher.take([THINK, *b"hm"])
    assert ord("x") in ids(matcher.masks()[0])
    matcher.take([END_THINK])
    assert THINK not in ids(matcher.masks()[0])
    assert ord("{") in ids(matcher.masks()[0])


def test_white_space_may_come_before_reasoning_and_is_no_part_of_what_follows(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object(), start="either")
    matcher.take(list(b"\n" * 15))
    assert THINK in ids(matcher.masks()[0])
    opened = make(vocabulary, sources.json_object(), start="either")
    opened.take([*b"\n\n", THINK, *b"hm", END_THINK])
    fresh = make(vocabulary, sources.json_object())
    assert (opened.masks(list(b'{"a"'))[1:] == fresh.masks(list(b'{"a"'))[1:]).all()
    assert (opened.masks()[0] == fresh.masks()[0]).all()
    matcher.take(list(b"\n"))
    matcher.take([ord("{")])
    assert THINK not in ids(matcher.masks()[0])


DRAFTS: list[tuple[Start, Sequence[int], Sequence[int]]] = [
    ("content", b"", b'{"a"'),
    ("content", b'{"a":1', [*b"}", END, END, ord("x")]),
    ("content", b'{"a":1', b"x}"),
    ("content", b'{"a"', [ord(":"), -1, 5]),
    ("reasoning", b"hm </th", [*b"ink>{}", END]),
    ("either", b"\n", [ord("\n"), THINK, *b"x", END_THINK, *b"{}", END]),
    ("either", b"", [THINK, *b"x", END_THINK, *b"{}", END]),
]


@pytest.mark.parametrize(("start", "taken", "drafts"), DRAFTS)
def test_row_i_is_the_mask_after_i_drafts(
    vocabulary: Vocabulary, start: Start, taken: Sequence[int], drafts: Sequence[int]
) -> None:
    matcher = make(vocabulary, SOURCES["object"], start)
    matcher.take(list(taken))
    alone = matcher.masks()[0]
    rows = matcher.masks(list(drafts))
    assert len(rows) == 1 + len(drafts)
    assert (matcher.masks()[0] == alone).all(), "looking ahead changed nothing"
    plain, valid = make(vocabulary, SOURCES["object"], start), True
    plain.take(list(taken))
    for row, draft in zip(rows, [*drafts, 0], strict=True):
        expected = plain.masks()[0] if valid else np.full_like(row, -1)
        assert (row == expected).all()
        valid = valid and 0 <= draft < WIDTH and allowed(row, draft)
        if valid:
            plain.take([draft])
    assert not matcher.fault
    assert not plain.fault


def test_a_token_that_no_mask_allowed_is_a_fault(vocabulary: Vocabulary) -> None:
    matcher = make(vocabulary, sources.json_object(), ends=(END, TURN))
    matcher.take(list(b"{x"))
    assert "does not continue" in matcher.fault
    assert ids(matcher.masks([5])[0]) == {END, TURN}
    assert not matcher.complete


def test_a_grammar_that_outgrows_the_limits_on_the_way_is_a_fault_where_the_reply_comes_there(
    vocabulary: Vocabulary,
) -> None:
    names = {f"p{index}": {"type": "string"} for index in range(60)}
    source = sources.json_schema({"type": "object", "properties": names})
    matcher = Matcher(Grammar(source=source, ends=(END,)), vocabulary, vocabulary.parser(source, max_alternatives=100))
    alone = matcher.masks()[0]
    rows = matcher.masks(list(b'{"'))
    assert (rows[0] == alone).all()
    assert ids(rows[1]) == {END}
    assert not matcher.fault, "a draft need not stand"
    assert (matcher.masks()[0] == alone).all()
    matcher.take(list(b"{"))
    assert ids(matcher.masks()[0]) == {END}
    assert matcher.fault
    assert not matcher.complete


def test_the_same_tokens_give_the_same_masks_however_they_were_taken(vocabulary: Vocabulary) -> None:
    text = list(b'{"name":"ab","n":12}')
    one, other = make(vocabulary, SOURCES["schema"]), make(vocabulary, SOURCES["schema"])
    for at, token in enumerate(text):
        one.masks(text[at : at + 3])
        one.take([token])
    other.take(text)
    assert (one.masks([END]) == other.masks([END])).all()


def budgeted(vocabulary: Vocabulary, source: str, budget: int, start: Start = "reasoning") -> Matcher:
    ends = (END,) if source else ()
    grammar = Grammar(source=source, ends=ends, start=start, opener="<think>", closer="</think>", budget=budget)
    return Matcher(grammar, vocabulary, vocabulary.parser(source) if source else None)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("source", ["", SOURCES["object"]])
def test_reasoning_ends_by_its_marker_when_its_budget_is_spent(
    vocabulary: Vocabulary, source: str, budget: int
) -> None:
    matcher = budgeted(vocabulary, source, budget)
    plain = make(vocabulary, source or sources.json_object(), "reasoning")
    word = PIECES.index(b"a")
    for _ in range(budget):
        (mask,) = matcher.masks()
        assert ids(mask) >= ids(plain.masks()[0]), "until then nothing is changed"
        matcher.take([word])
        plain.take([word])
    assert ids(matcher.masks()[0]) == {END_THINK}
    matcher.take([END_THINK])
    content = matcher.masks()[0]
    fresh = Matcher(Grammar(source=source, ends=(END,)), vocabulary, vocabulary.parser(source)) if source else None
    assert ids(content) == (ids(fresh.masks()[0]) if fresh else set(range(32 * vocabulary.words)))
    assert not matcher.fault


def test_a_budget_counts_drafts_only_once_they_stand(vocabulary: Vocabulary) -> None:
    word = PIECES.index(b"a")
    for source in ("", SOURCES["object"]):
        matcher = budgeted(vocabulary, source, 2)
        for _ in range(2):
            rows = matcher.masks([word, word, END_THINK])
            assert ids(rows[2]) == {END_THINK}
            assert word in ids(rows[0])
        wrong = matcher.masks([word, word, word])
        assert ids(wrong[2]) == {END_THINK}
        assert (wrong[3] == -1).all()
        matcher.take([word])
        assert ids(matcher.masks([word])[1]) == {END_THINK}


def test_a_model_that_closes_in_time_is_not_touched(vocabulary: Vocabulary) -> None:
    matcher = budgeted(vocabulary, "", 3)
    matcher.take([PIECES.index(b"a"), END_THINK, *[PIECES.index(b"a")] * 9])
    assert (matcher.masks()[0] == -1).all()
    assert not matcher.fault
    opens = budgeted(vocabulary, "", 1, "either")
    opens.take([THINK, PIECES.index(b"a")])
    assert ids(opens.masks()[0]) == {END_THINK}
    answers = budgeted(vocabulary, "", 1, "either")
    answers.take([PIECES.index(b"a")] * 5)
    assert (answers.masks()[0] == -1).all()


def test_a_marker_that_is_no_token_is_spelled_out(vocabulary: Vocabulary) -> None:
    grammar = Grammar(source="", ends=(), start="reasoning", closer="<end>a", budget=1)
    matcher = Matcher(grammar, vocabulary, None)
    matcher.take([PIECES.index(b"a")])
    spelled = b""
    for _ in range(len(b"<end>a")):
        if spelled.endswith(b"<end>a"):
            break
        (token,) = ids(matcher.masks()[0])
        spelled += PIECES[token]
        matcher.take([token])
    assert spelled == b"<end>a"
    assert (matcher.masks()[0] == -1).all()
