"""Grammars are tried in processes that are killed when they take too long or too much."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dgpp_core.api.errors import EngineError
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.frames import Tokens
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.trial import Trial

from .conftest import CALL, CONTROL, END, PIECES, WIDTH

ENDLESS = {"type": "integer", "multipleOf": 99_999_989}
"""A remainder for each state of the automaton."""


def deep(levels: int) -> Any:
    schema: Any = {"type": "null"}
    for level in range(levels):
        names = [f"{level}{side}" for side in "ab"]
        schema = {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, "v": schema}, "required": ["k"]}
                for name in names
            ]
        }
    return schema


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    made = Trial(Tokens(WIDTH, END, {token: PIECES[token] for token in sorted(CONTROL)}), processes=2, seconds=1.0)
    made.start()
    yield made
    made.close()


def test_a_grammar_that_compiles(trial: Trial) -> None:
    trial.check(sources.json_object())
    trial.check(sources.json_schema(deep(6)))
    trial.check(f'%llguidance {{"no_forcing": true}}\nstart: <[{CALL}]> "x"')


BAD = {
    "malformed": ("start: (", "Expected token"),
    "unknown control token": ('start: <[9999]> "x"', "9999"),
    "nothing matches": (f"{sources.TEXT_OPTIONS}\nstart: a\na: b\nb: a", "NoExtension"),
    "contradiction": (sources.json_schema({"type": "string", "pattern": "^a$", "minLength": 3}), "nsatisfiable"),
    "options that overlap": (sources.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    "too large": ('start: "' + "a" * 2_000_000 + '"', "larger than"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_grammar_that_does_not(trial: Trial, name: str) -> None:
    source, why = BAD[name]
    with pytest.raises(GrammarError, match=why):
        trial.check(source)
    with pytest.raises(GrammarError, match=why):
        trial.check(source)


def test_one_that_takes_too_long_is_killed_while_others_are_tried(trial: Trial) -> None:
    found: list[str] = []

    def endless() -> None:
        with pytest.raises(GrammarError) as caught:
            trial.check(sources.json_schema(ENDLESS))
        found.append(str(caught.value))

    thread = threading.Thread(target=endless)
    started = time.monotonic()
    thread.start()
    trial.check(sources.json_schema({"const": "meanwhile"}))
    thread.join(timeout=30)
    assert found == ["compiling it takes more than 1 s"]
    assert time.monotonic() - started < 20
    trial.check(sources.json_schema({"const": "afterwards"}))


def test_a_process_that_died_is_replaced(trial: Trial) -> None:
    for process in trial._all:
        process.start()
        assert process._process is not None
        process._process.kill()
        process._process.wait()
    trial.check(sources.json_schema({"const": "anew"}))


def test_a_process_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    broken = Trial(Tokens(WIDTH, END, {}), processes=1)
    with pytest.raises(EngineError, match="does not start"):
        broken.start()
    broken.close()


def test_who_asks_for_a_grammar_that_is_being_tried_waits_for_that_and_starts_no_trial_of_its_own(trial: Trial) -> None:
    """vllm#54003: clients that asked again for a schema without end kept everyone else's from being compiled."""

    def ask(divisor: int) -> None:
        with pytest.raises(GrammarError, match="more than 1 s"):
            trial.check(sources.json_schema({"type": "integer", "multipleOf": divisor}))

    def seconds(asking: int, divisor: int) -> float:
        started = time.monotonic()
        with ThreadPoolExecutor(asking) as pool:
            list(pool.map(ask, [divisor] * asking))
        return time.monotonic() - started

    assert seconds(12, 99_999_971) < 2.5 * seconds(1, 99_999_959)


def test_closing_ends_every_check_that_runs_or_waits() -> None:
    """A service that stops would otherwise wait until every grammar in the queue has been given up."""
    made = Trial(Tokens(WIDTH, END, {token: PIECES[token] for token in sorted(CONTROL)}), processes=1, seconds=30.0)
    made.start()
    verdicts: list[str] = []

    def ask(divisor: int) -> None:
        with pytest.raises(GrammarError) as caught:
            made.check(sources.json_schema({"type": "integer", "multipleOf": divisor}))
        verdicts.append(str(caught.value))

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, divisor) for divisor in (99_999_989, 99_999_971, 99_999_959, 99_999_941)]
        time.sleep(0.3)
        made.close()
        for one in asked:
            one.result(timeout=10)
    assert verdicts == ["the service is stopping"] * 4
