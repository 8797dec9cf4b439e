"""A tokenizer with the markers of every dialect, and replies played through the parser of replies."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from dgpp_core.testing.tool_replies import RULES, WORDS, ToolReply
from dgpp_core.text.reply import Delta, ReplyParser
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tools.detect import DIALECTS
from dgpp_core.text.tools.events import ArgumentsDelta, CallClosed, CallOpened
from dgpp_core.text.tools.parser import CallParser
from dgpp_core.text.tools.rules import CallRules

THINK = ("<think>", "</think>")


class Played(msgspec.Struct):
    """What a client would have put together from a stream."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = []
    closed: int = 0
    tokens: list[int] = []


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    corpus = [
        *WORDS,
        *(tool.name for tool in RULES.tools),
        '"} {": ',
        "\n<parameter=path>\n</parameter>\n</function>\n",
    ]
    backend.train_from_iterator(corpus * 4, trainer)
    markers = sorted({marker for dialect in DIALECTS for marker in dialect.markers})
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in (*THINK, *markers)])
    backend.add_special_tokens([AddedToken("<|user|>", normalized=False), AddedToken("<|end|>", normalized=False)])
    folder = tmp_path_factory.mktemp("tools")
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(Path(folder))


@pytest.fixture(scope="session")
def cut(tokenizer: Tokenizer) -> Callable[..., list[int]]:
    """``cut(reply, generator, longest)``: ids of a reply, its texts cut at random into tokens of so many bytes."""
    markers = {marker.encode() for found in DIALECTS for marker in found.markers} | {mark.encode() for mark in THINK}
    pieces = {number: tokenizer.token_bytes(number) for number in range(tokenizer.vocab_size)}
    plain = {raw: number for number, raw in pieces.items() if raw not in markers and not tokenizer.is_special(number)}

    def cut(reply: ToolReply, generator: random.Random, longest: int) -> list[int]:
        ids: list[int] = []
        for piece in reply.pieces:
            if isinstance(piece, int):
                found = tokenizer.id_of(reply.dialect.markers[piece])
                assert found is not None
                ids.append(found)
                continue
            raw = piece.encode()
            while raw:
                size = generator.choice([n for n in range(1, min(longest, len(raw)) + 1) if raw[:n] in plain])
                ids.append(plain[raw[:size]])
                raw = raw[size:]
        return ids

    return cut


@pytest.fixture(scope="session")
def play(tokenizer: Tokenizer) -> Callable[..., Played]:
    """``play(reply, ids)``: what a strict client makes of the ids."""

    def play(
        reply: ToolReply, ids: Sequence[int], *, incremental: bool = False, rules: CallRules = RULES, **options: Any
    ) -> Played:
        calls = CallParser(reply.dialect, rules, incremental=incremental)
        end = tokenizer.id_of("<|end|>")
        assert end is not None
        parser = ReplyParser(
            tokenizer,
            reasoning=THINK,
            calls=calls,
            hidden_ids=frozenset({end}),
            **{"in_reasoning": False} | options,
        )
        played = Played()
        parts = [part for number in ids for part in parser.push(number)] + [*parser.finish()]
        for part in parts:
            if isinstance(part, Delta):
                assert part.text
                if part.kind == "reasoning":
                    played.reasoning += part.text
                else:
                    played.content += part.text
                played.tokens += part.tokens
            elif isinstance(part, CallOpened):
                assert part.call == len(played.calls)
                played.calls.append([part.name, ""])
            elif isinstance(part, ArgumentsDelta):
                assert part.call == len(played.calls) - 1
                assert incremental or part.call == played.closed
                assert part.text
                played.calls[-1][1] += part.text
            else:
                assert isinstance(part, CallClosed)
                assert part.call == len(played.calls) - 1
                played.closed += 1
                assert isinstance(json.loads(played.calls[-1][1]), dict)
        assert parser.call_count == len(played.calls)
        assert played.tokens == sorted(set(played.tokens))
        return played

    return play
