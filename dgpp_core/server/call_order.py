"""Results of tools in the order of their calls: chat templates tell by that order alone which result is whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dgpp_core.server.translate import Paths, no_such_call


def in_call_order(messages: Sequence[Any]) -> tuple[list[Any], Paths]:
    """Chat messages, each turn's results sorted by its calls, and where those that moved stood.

    Results whose call is not known stay where they are, and so do messages that are malformed.
    """
    places = list(range(len(messages)))
    for order, run in _results(messages):
        calls = [messages[at].get("tool_call_id") for at in run]
        if all(isinstance(call, str) and call in order for call in calls):
            ranked = sorted(zip(calls, run, strict=True), key=lambda pair: order[pair[0]])
            places[run[0] : run[-1] + 1] = [at for _, at in ranked]
    paths = Paths({})
    for at, own in enumerate(places):
        if at != own:
            paths.add(f"messages[{at}]", f"messages[{own}]")
    return [messages[own] for own in places], paths


def check_results(messages: Sequence[Any]) -> None:
    """Every result that names a call names one before it.

    Raises:
        RequestError: 400 with the path of the name.
    """
    known: set[str] = set()
    for at, message in enumerate(messages):
        if not isinstance(message, Mapping):
            continue
        known.update(_calls(message))
        call, path = message.get("tool_call_id"), f"messages[{at}].tool_call_id"
        if message.get("role") == "tool" and isinstance(call, str) and call not in known:
            raise no_such_call(call, path)


def _results(messages: Sequence[Any]) -> Iterator[tuple[Mapping[str, int], list[int]]]:
    """Runs of results, by their indexes, each with the order of the calls before it."""
    order: Mapping[str, int] = {}
    run: list[int] = []
    for at, message in enumerate(messages):
        if isinstance(message, Mapping) and message.get("role") == "tool":
            run.append(at)
            continue
        if run:
            yield order, run
        order, run = _calls(message), []
    if run:
        yield order, run


def _calls(message: Any) -> Mapping[str, int]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    order: dict[str, int] = {}
    for at, call in enumerate(calls if isinstance(calls, list) else ()):
        if isinstance(call, Mapping) and isinstance(call.get("id"), str):
            order.setdefault(call["id"], at)
    return order
