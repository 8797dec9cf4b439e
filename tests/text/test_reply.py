"""Every way of cutting a reply into tokens gives the same stream, and the stream equals the whole reply."""

import itertools
import random
from collections.abc import Sequence

import msgspec
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dgpp_core.text.reply import LEADING_SPACE, Delta, ReplyParser
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tokenizer_files import TokenizerConfig

THINK = ("<think>", "</think>")
FRAGMENTS = [
    "<", "</", "</t", "</thi", "</think", "<think", "think>", "</think>", "<think>", "</ think>", "</thin</think>",
    "\n\n", " ", "E", "EN", "END", "\nUser", "\nUser:", ":", "a < b", "안녕하세요", "龘", "👩‍👩‍👧‍👦", "🇰🇷", "\ufffd",
    "\x00\x1b", "The quick brown fox", "é", "e\u0301", "x = 1\n", "<br>", "</b>", "<tool_call>", "StopStop", "Sto",
]  # fmt: skip
STOPS: list[tuple[str, ...]] = [
    (),
    ("END",),
    ("\nUser:", "END"),
    ("Stop", "StopStop", "<br>"),
    ("</think>",),
    ("👩‍👩",),
]


class Case(msgspec.Struct, frozen=True):
    """One golden reply and how it is read."""

    text: str
    in_reasoning: bool
    stops: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True):
    """What a client has seen of a reply in the end."""

    reasoning: str
    content: str
    stopped: bool


def golden_replies(count: int) -> list[Case]:
    source = random.Random(11)
    cases = []
    for number in range(count):
        body = source.choices(FRAGMENTS, k=source.randrange(0, 9))
        shape = number % 4
        if shape == 1:
            body = ["<think>", *body]
        elif shape == 2:
            body.insert(source.randrange(len(body) + 1), "</think>")
        elif shape == 3:
            body = [" \n" * source.randrange(3), "<think>", *body, "</think>", *source.choices(FRAGMENTS, k=4)]
        stops = source.choice(STOPS)
        if stops and number % 2:
            body.insert(source.randrange(len(body) + 1), source.choice(stops))
        cases.append(Case("".join(body), shape in (0, 2) and number % 3 != 0, stops))
    return cases


REPLIES = golden_replies(240)


def spans(case: Case) -> tuple[int, int, int]:
    """Where reasoning starts and ends, and where content starts, by looking at the whole text."""
    start = 0
    if not case.in_reasoning:
        space = len(case.text) - len(case.text.lstrip())
        if space > LEADING_SPACE or not case.text[space:].startswith(THINK[0]):
            return 0, 0, 0
        start = space + len(THINK[0])
    end = case.text.find(THINK[1], start)
    return (start, len(case.text), len(case.text)) if end < 0 else (start, end, end + len(THINK[1]))


def visible(case: Case) -> tuple[int, int, bool]:
    """Start and end of what is shown of the content, and whether a stop string ended it."""
    begin = spans(case)[2]
    for end in range(begin, len(case.text) + 1):
        starts = [end - len(stop) for stop in case.stops if case.text[begin:end].endswith(stop)]
        if starts:
            return begin, min(starts), True
    return begin, len(case.text), False


def expected(case: Case) -> Outcome:
    (start, end, _), (begin, stop, stopped) = spans(case), visible(case)
    return Outcome(case.text[start:end], case.text[begin:stop], stopped)


def of_pieces(backend: tokenizers.Tokenizer, pieces: Sequence[bytes]) -> Tokenizer:
    """A tokenizer whose id n stands for the n-th piece."""
    return Tokenizer(backend, pieces, frozenset(), frozenset(), TokenizerConfig())


def read(tokenizer: Tokenizer, ids: Sequence[int], case: Case) -> tuple[list[Delta], ReplyParser]:
    parser = ReplyParser(tokenizer, reasoning=THINK, in_reasoning=case.in_reasoning, stops=case.stops)
    deltas = [delta for token_id in ids for delta in parser.push(token_id)]
    deltas += parser.finish()
    assert parser.finish() == ()
    assert all(delta.text for delta in deltas)
    return deltas, parser


def outcome(deltas: Sequence[Delta], parser: ReplyParser) -> Outcome:
    joined = {kind: "".join(delta.text for delta in deltas if delta.kind == kind) for kind in ("reasoning", "content")}
    return Outcome(joined["reasoning"], joined["content"], parser.stopped)


def check(tokenizer: Tokenizer, ids: Sequence[int], case: Case) -> None:
    """The stream, its token indexes and the reasoning count against what the whole text says."""
    deltas, parser = read(tokenizer, ids, case)
    assert outcome(deltas, parser) == expected(case)
    kinds = [delta.kind for delta in deltas]
    assert kinds == sorted(kinds, reverse=True)
    ends, total = [], 0
    for token_id in ids:
        total += len(tokenizer.token_bytes(token_id))
        ends.append(total)
    starts = [0, *ends]
    begin, stop, _ = visible(case)
    first, last = len(case.text[:begin].encode()), len(case.text[:stop].encode())
    shown = [n for n, end in enumerate(ends) if end > first and starts[n] < last and end > starts[n]] * (first < last)
    assert [token for delta in deltas for token in delta.tokens] == shown
    assert parser.reasoning_tokens == reasoning_count(case, ends)


def reasoning_count(case: Case, ends: Sequence[int]) -> int:
    _, end, after = spans(case)
    if after == 0 and not case.in_reasoning:
        return 0
    if end == after:
        return len(ends)
    closed = len(case.text[:after].encode())
    return next(n for n, position in enumerate(ends) if position >= closed) + 1


def cut(raw: bytes, at: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(at), len(raw)]
    return [raw[left:right] for left, right in itertools.pairwise(edges)]


def test_the_replies_cover_what_they_should() -> None:
    found = [expected(case) for case in REPLIES]
    assert len(REPLIES) >= 200
    assert sum(one.stopped for one in found) > 30
    assert sum(bool(one.reasoning) for one in found) > 60
    assert sum(bool(one.reasoning and one.content) for one in found) > 40
    assert sum(bool(one.content and not one.reasoning) for one in found) > 40


@pytest.mark.parametrize("case", REPLIES, ids=range(len(REPLIES)))
def test_every_two_cut_and_many_multi_cuts_in_bytes(backend: tokenizers.Tokenizer, case: Case) -> None:
    raw = case.text.encode()
    source = random.Random(len(raw))
    cuts = [cut(raw, [n]) for n in range(len(raw) + 1)]
    cuts += [cut(raw, source.choices(range(len(raw) + 1), k=source.randrange(2, 12))) for _ in range(20)]
    cuts += [[raw[n : n + 1] for n in range(len(raw))]]
    for pieces in cuts:
        check(of_pieces(backend, pieces), range(len(pieces)), case)


@pytest.mark.parametrize("case", REPLIES, ids=range(len(REPLIES)))
def test_tokens_of_a_real_tokenizer_and_their_bytes(tokenizer: Tokenizer, case: Case) -> None:
    """Markers come as one id from ``encode`` and byte by byte from the alphabet; both read the same."""
    ids = tokenizer.encode(case.text)
    check(tokenizer, ids, case)
    single = {piece: i for i in range(tokenizer.vocab_size) if len(piece := tokenizer.token_bytes(i)) == 1}
    for edge in range(len(ids) + 1):
        spelled = [single[bytes([byte])] for i in ids[edge:] for byte in tokenizer.token_bytes(i)]
        check(tokenizer, [*ids[:edge], *spelled], case)


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.sampled_from([*FRAGMENTS, "q"]), max_size=10).map("".join),
    in_reasoning=st.booleans(),
    stops=st.sampled_from(STOPS),
    data=st.data(),
)
def test_any_reply_cut_anyhow(
    backend: tokenizers.Tokenizer, text: str, in_reasoning: bool, stops: tuple[str, ...], data: st.DataObject
) -> None:
    raw = text.encode()
    at = data.draw(st.lists(st.integers(0, len(raw)), max_size=8))
    pieces = cut(raw, at)
    check(of_pieces(backend, pieces), range(len(pieces)), Case(text, in_reasoning, stops))


def test_bytes_that_are_no_text_are_replaced_and_counted_where_they_fall(backend: tokenizers.Tokenizer) -> None:
    pieces = [b"a", b"\xf0\x9f", b"END", b"tail"]
    deltas, parser = read(of_pieces(backend, pieces), range(4), Case("", False, ("END",)))
    assert outcome(deltas, parser) == Outcome("", "a\ufffd", True)
    # The broken character is shown and was begun by token 1; token 2 is wholly cut.
    assert [token for delta in deltas for token in delta.tokens] == [0, 1]


@pytest.mark.parametrize("inside", [True, False])
def test_a_reply_cut_inside_a_character_ends_in_a_replacement(backend: tokenizers.Tokenizer, inside: bool) -> None:
    deltas, parser = read(of_pieces(backend, [b"a", b"\xe4\xb8"]), range(2), Case("", inside, ()))
    assert outcome(deltas, parser) == (Outcome("a\ufffd", "", False) if inside else Outcome("", "a\ufffd", False))
    assert [token for delta in deltas for token in delta.tokens] == ([] if inside else [0, 1])


def test_hidden_and_special_ids_show_nothing_and_bytes_join_across_them(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first, *rest = (single[bytes([byte])] for byte in "🙂".encode())
    end, start = tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|im_start|>")
    hidden, other = single[b"x"], single[b"y"]
    assert end is not None
    assert start is not None
    parser = ReplyParser(tokenizer, reasoning=None, in_reasoning=False, hidden_ids=frozenset({hidden}))
    deltas = [delta for i in (first, end, hidden, *rest, start, other) for delta in parser.push(i)]
    assert deltas == [Delta("content", "🙂", (0, 3, 4, 5)), Delta("content", "y", (7,))]
    assert parser.reasoning_tokens == 0


def test_markers_that_are_special_tokens_still_count(backend: tokenizers.Tokenizer) -> None:
    open_id, close_id = (backend.token_to_id(marker) for marker in THINK)
    pieces = [bytes([65 + n % 26]) for n in range(close_id + 1)]
    pieces[open_id], pieces[close_id] = (marker.encode() for marker in THINK)
    special = Tokenizer(backend, pieces, frozenset({open_id, close_id}), frozenset(), TokenizerConfig())
    deltas, parser = read(special, [open_id, 0, close_id, 1], Case("", False, ()))
    assert deltas == [Delta("reasoning", "A"), Delta("content", "B", (3,))]
    assert parser.reasoning_tokens == 3


@pytest.mark.parametrize("pieces", [[b"plan</think>END"], [b"pl", b"an</thi", b"nk>E", b"ND"]])
@pytest.mark.parametrize("in_reasoning", [True, False])
def test_reasoning_in_content_keeps_the_markers_the_model_wrote(
    backend: tokenizers.Tokenizer, pieces: list[bytes], in_reasoning: bool
) -> None:
    pieces = pieces if in_reasoning else [b"<thi", b"nk>", *pieces]
    parser = ReplyParser(
        of_pieces(backend, pieces),
        reasoning=THINK,
        in_reasoning=in_reasoning,
        stops=("END", "plan"),
        reasoning_in_content=True,
    )
    deltas = [delta for i in range(len(pieces)) for delta in parser.push(i)]
    assert "".join(delta.text for delta in deltas) == ("" if in_reasoning else "<think>") + "plan</think>"
    assert {delta.kind for delta in deltas} == {"content"}
    # Reasoning is hidden from stop strings and from logprobs wherever it is shown.
    assert parser.stopped
    assert all(delta.tokens == () for delta in deltas)


def test_a_marker_inside_content_is_text(backend: tokenizers.Tokenizer) -> None:
    pieces = [b"write <think> and ", b"</think> around it"]
    deltas, parser = read(of_pieces(backend, pieces), range(2), Case("", False, ()))
    assert outcome(deltas, parser) == Outcome("", "write <think> and </think> around it", False)


def test_white_space_without_end_is_not_held_back(backend: tokenizers.Tokenizer) -> None:
    parser = ReplyParser(of_pieces(backend, [b"\n"]), reasoning=THINK, in_reasoning=False)
    deltas = [delta for _ in range(100) for delta in parser.push(0)]
    assert "".join(delta.text for delta in deltas) == "\n" * 100


@pytest.mark.parametrize("text", ["<", "<thin", "\n", " <think"])
def test_what_might_have_been_a_marker_is_searched_for_stops_in_the_end(
    backend: tokenizers.Tokenizer, text: str
) -> None:
    case = Case(text, False, ("<", "\n"))
    deltas, parser = read(of_pieces(backend, [text.encode()]), range(1), case)
    assert outcome(deltas, parser) == Outcome("", text.split("<")[0].strip("\n"), True)


def test_pushes_after_a_stop_return_nothing(backend: tokenizers.Tokenizer) -> None:
    parser = ReplyParser(of_pieces(backend, [b"aEND", b"b"]), reasoning=None, in_reasoning=False, stops=("END",))
    assert parser.push(0) == (Delta("content", "a", (0,)),)
    assert parser.stopped
    assert parser.push(1) == parser.finish() == ()
