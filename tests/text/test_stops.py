from hypothesis import given, settings
from hypothesis import strategies as st

from dgpp_core.text.stops import StopMatcher

STOPS = st.lists(st.text("ab<", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)
PIECES = st.lists(st.text("ab<", max_size=4), max_size=12)


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop that is complete first begins; of two complete at once, the longer one's."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@settings(max_examples=1000, deadline=None)
@given(STOPS, PIECES)
def test_any_pieces_show_what_stands_before_the_first_stop(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        text += piece
        cut = first_stop(text, stops)
        assert matcher.matched == (cut is not None)
        if cut is None:
            # Held back is the longest suffix that could begin a stop, no more and no less.
            held = len(text) - len(shown)
            begins = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) for s in stops)]
            assert text.startswith(shown)
            assert held == max(begins)
    cut = first_stop(text, stops)
    assert shown + matcher.finish() == (text if cut is None else text[:cut])
    assert matcher.finish() == ""


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(("END",))
    assert matcher.push("abENDcd") == "ab"
    assert matcher.matched
    assert matcher.push("more") == matcher.finish() == ""


def test_the_stop_that_is_complete_first_wins() -> None:
    assert StopMatcher(("abcd", "bc")).push("abcd") == "a"
    assert StopMatcher(("bc", "abc")).push("xabc") == "x"


def test_without_stops_all_text_passes() -> None:
    matcher = StopMatcher(())
    assert matcher.push("<a") == "<a"
    assert matcher.finish() == ""
    assert not matcher.matched


def test_a_long_stop_over_text_that_keeps_almost_matching() -> None:
    stop = "a" * 5000 + "b"
    matcher = StopMatcher((stop,))
    shown = "".join(matcher.push("a" * 100) for _ in range(100))
    assert shown == "a" * 5000
    assert matcher.push("bx") == ""
    assert matcher.matched
