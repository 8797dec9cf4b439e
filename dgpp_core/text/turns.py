"""Where a template's turns part: the added tokens that come first behind what somebody said."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from dgpp_core.api.errors import RequestError
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tokenizer import Tokenizer

_SAID = ("qZ7aone", "qZ7btwo", "qZ7cthree", "qZ7dfour")
"""What is said in the conversations that are tried, each found once in the prompt."""


def turn_marks(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Added tokens in front of which a prompt may be cut and tokenized in parts, at the ends of its messages.

    Such a token closes a message or opens the next one, as the template has it. They are found by trying: the first one
    behind each message of some short conversations.
    """
    names = sorted(tokenizer.added_tokens, key=len, reverse=True)
    if not names:
        return ()
    added = re.compile("|".join(map(re.escape, names)))
    found = {mark for prompt in _tried(template) for mark in _behind_messages(prompt, added)}
    return tuple(sorted(mark for mark in found if tokenizer.stands_alone(mark)))


def _tried(template: ChatTemplate) -> Iterator[str]:
    for messages in _conversations():
        try:
            yield template.render(messages)
        except RequestError:  # a template has its own rules of who may speak, and when
            continue


def _conversations() -> Sequence[list[dict[str, Any]]]:
    one, two, three, four = _SAID
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    turns = [{"role": "user", "content": two}, {"role": "assistant", "content": three}]
    return (
        [{"role": "system", "content": one}, *turns, {"role": "user", "content": four}],
        [*turns, {"role": "user", "content": four}],
        [
            {"role": "user", "content": one},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": two},
        ],
    )


def _behind_messages(prompt: str, added: re.Pattern[str]) -> Iterator[str]:
    ends = sorted(prompt.rindex(said) + len(said) for said in _SAID if said in prompt)
    for start, end in pairwise([*ends, len(prompt)]):
        if (first := added.search(prompt, start, end)) is not None:
            yield first[0]
