"""Replies held to grammars by a real engine: alone, in company, drafted, preempted, on two ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.api import EngineError, StepBatch
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.engine import Engine
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.engine.geometry import make_geometry
from dgpp_core.host.loading import LoadedModel
from dgpp_core.ops.pick import greedy
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import Reply, World
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary

END, OTHER_END, THINK_END = 256, 257, 258
PIECES = [*(bytes([byte]) for byte in range(256)), b"<end>", b"<other>", b"</think>", b'{"', b'":', b"12", b"ab"]
PROMPT = tuple(range(1, 21))
SEEDED = SamplingParams(temperature=1.5, seed=5)
SCHEMA = {
    "type": "object",
    "properties": {"k": {"type": "string", "maxLength": 3}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["k", "n"],
    "additionalProperties": False,
}
OBJECT = Grammar(source=sources.json_schema(SCHEMA), ends=(END,))
CODE = Grammar(source=sources.regex("[abc]{9}-[0-9]{6}"), ends=(OTHER_END,))


def vocabulary(width: int) -> Vocabulary:
    return Vocabulary(PIECES, frozenset({END, OTHER_END, THINK_END}), frozenset(), width, END)


def text(reply: Reply) -> bytes:
    shown = [token for token in reply.tokens if token not in (END, OTHER_END)]
    return b"".join(PIECES[token] if token < len(PIECES) else b"?" for token in shown)


@pytest.fixture
def held(make_world: Callable[..., World]) -> Callable[..., World]:
    def make(**changes: int) -> World:
        world = make_world(lag=changes.get("lag", 0))
        world.engine.offer_grammars(vocabulary(world.engine.vocab_size))
        return world

    return make


def run(world: World, grammar: Grammar | None, params: SamplingParams, tokens: int = 240) -> int:
    return world.submit(PROMPT, tokens, params=params, eos_ids=(END, OTHER_END), grammar=grammar)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_replies_conform_whatever_else_runs(held: Callable[..., World], params: SamplingParams, lag: int) -> None:
    alone = held(lag=lag)
    for grammar in (OBJECT, CODE, None):
        run(alone, grammar, params)
        alone.run()
    together = held(lag=lag)
    for grammar in (OBJECT, CODE, None):
        run(together, grammar, params)
    together.run()
    assert [reply.tokens for reply in together.replies.values()] == [reply.tokens for reply in alone.replies.values()]
    found, code, _ = together.replies.values()
    assert found.reason == code.reason == "eos"
    assert set(json.loads(text(found))) == {"k", "n"}
    assert re.fullmatch(rb"[abc]{9}-[0-9]{6}", text(code))
    assert code.tokens[-1] == OTHER_END


def test_a_held_reply_is_picked_where_a_free_one_would_be(held: Callable[..., World]) -> None:
    world = held()
    for params in (GREEDY, SEEDED):
        for grammar in (CODE, None):
            run(world, grammar, params, 40)
    for _ in range(3):
        world.tick()
    modes = [info.mode for _, info in sorted(world.engine.slots.items())]
    assert modes == ["greedy", "greedy", "host", "host"], "only a GPU samples"


def test_static_buffers_hold_replies_as_shapes_that_come(
    tiny: LoadedModel, checkpoint: Path, held: Callable[..., World]
) -> None:
    """Three requests in buffers for four: the inert row has no mask."""
    settings = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.0)
    static, plain = World.from_checkpoint(tiny, checkpoint, settings, static=True), held()
    static.engine.offer_grammars(vocabulary(static.engine.vocab_size))
    for world in (static, plain):
        for grammar, params in ((CODE, GREEDY), (OBJECT, SEEDED), (None, GREEDY)):
            run(world, grammar, params, 40)
        world.run()
    assert [reply.tokens for reply in static.replies.values()] == [reply.tokens for reply in plain.replies.values()]


def test_what_is_wrong_with_a_row_is_not_hidden_by_its_mask(held: Callable[..., World]) -> None:
    """A NaN where the grammar forbids the token, and a row whose allowed tokens are all -inf."""
    logits = torch.zeros(3, 100)
    logits[0, 5], logits[1, 64:] = torch.nan, -torch.inf
    masks = torch.tensor([[0, 0, -1, -1]] * 3, dtype=torch.int32)
    tokens, fine = greedy(logits)
    held().engine.program.restrict(logits, tokens, fine, masks)
    assert fine.tolist() == [False, False, True]
    assert tokens[2] == 64


def test_the_grammar_starts_behind_the_reasoning_which_cannot_end_the_reply(held: Callable[..., World]) -> None:
    world = held()
    grammar = Grammar(source=CODE.source, ends=(END, OTHER_END), start="reasoning", closer="</think>")
    biased = SamplingParams(temperature=1.0, seed=1, logit_bias=((END, 100.0), (THINK_END, 9.0)))
    request = run(world, grammar, biased)
    reply = world.run()[request]
    assert reply.reason == "eos"
    assert re.fullmatch(rb"[abc]{9}-[0-9]{6}", text(reply).split(b"</think>", 1)[1])


def test_a_reply_that_cannot_go_on_ends_with_an_error_and_the_others_do_not_notice(
    held: Callable[..., World],
) -> None:
    world = held()
    dead = Grammar(source=f"{sources.TEXT_OPTIONS}\nstart: a\na: b\nb: a", ends=(END,))
    broken, fine = run(world, dead, GREEDY), run(world, CODE, GREEDY)
    malformed = run(world, Grammar(source="start: (", ends=(END,)), GREEDY)
    replies = world.run()
    assert replies[broken].reason == replies[malformed].reason == "error"
    assert "cannot be held to its grammar" in replies[broken].error
    assert not replies[broken].tokens
    assert replies[fine].reason == "eos"
    assert run(world, OBJECT, GREEDY) in world.run()


def test_without_a_vocabulary_a_grammar_is_refused_loudly(make_world: Callable[..., World]) -> None:
    world = make_world()
    run(world, OBJECT, GREEDY)
    with pytest.raises(EngineError, match="knows no tokens"):
        world.run()


class Scripted:
    """Drafts by position: what a reply had there when nothing was drafted, with mistakes of several kinds."""

    depth = 3

    def __init__(self, reply: Sequence[int]) -> None:
        self._reply = reply

    def observe(self, batch: StepBatch, hidden: Tensor, next_tokens: Tensor, state: object) -> Tensor:
        return hidden

    def propose(self, batch: StepBatch, hidden: Tensor, tokens: Tensor, depth: int, state: object) -> Tensor:
        rows = [
            [self._draft(position + 2 + at - len(PROMPT)) for at in range(depth)]
            for position in batch.positions.tolist()
        ]
        return torch.tensor(rows)

    def _draft(self, at: int) -> int:
        if at >= len(self._reply):
            return END
        return self._reply[at] if at % 5 else [ord("!"), END, THINK_END, ord("a")][at // 5 % 4]


def thinking(budget: int, source: str = "") -> Grammar:
    """So many tokens of reasoning, and then what ``source`` holds."""
    ends = (END, OTHER_END) if source else ()
    return Grammar(source=source, ends=ends, start="reasoning", closer="</think>", budget=budget)


@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
@pytest.mark.parametrize(
    "grammar",
    [CODE, thinking(0), thinking(1), thinking(6), thinking(7), thinking(8), thinking(9), thinking(7, CODE.source)],
    ids=["code", *(f"budget {budget}" for budget in (0, 1, 6, 7, 8, 9)), "budget 7, code"],
)
def test_drafts_change_nothing(
    held: Callable[..., World],
    tiny: LoadedModel,
    checkpoint: Path,
    params: SamplingParams,
    grammar: Grammar,
    rows_first: bool,
) -> None:
    """Nor does the order in which a GPU is given rows and masks, a tick ahead of its results."""
    plain = held()
    request = run(plain, grammar, params, 40)
    expected = plain.run()[request].tokens
    if grammar.budget >= 0:
        assert expected.index(THINK_END) == grammar.budget
        assert len(expected) > grammar.budget + 4
    settings = EngineSettings(
        max_concurrency=4, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.0, mtp=True, mtp_depth=3
    )
    prepared = prepare(tiny, checkpoint, settings)
    base = build_engine(prepared, torch.device("cpu"), lambda stage, done, total: None)
    engine = Engine(
        base.model, Scripted(expected), prepared.groups, make_geometry(prepared.config, prepared.groups, settings, 3),
        vocab_size=prepared.config.vocab_size, depth=3, device=torch.device("cpu"),
    )  # fmt: skip
    engine.offer_grammars(vocabulary(engine.vocab_size))
    engine.rows_first = rows_first
    limits = limits_from(engine.geometry, settings, engine.needs_snapshot)
    world = World(engine, limits, lag=1 if rows_first else 0)
    request = run(world, grammar, params, 40)
    reply = world.run()[request]
    assert reply.tokens == expected
    assert max(reply.updates) > 2, "drafts stood"
    assert min(reply.updates[1:]) < 4, "and some did not"


def test_a_reply_that_lost_its_slot_goes_on(tiny: LoadedModel, checkpoint: Path, held: Callable[..., World]) -> None:
    calm = held()
    expected = [run(calm, CODE, SEEDED), run(calm, CODE, GREEDY)]
    calm.run()
    settings = EngineSettings(
        max_concurrency=2, kv_capacity=64, block_tokens=16, prefix_cache_gib=0.0, admission="grow", admission_window=1
    )
    tight = World.from_checkpoint(tiny, checkpoint, settings)
    tight.engine.offer_grammars(vocabulary(tight.engine.vocab_size))
    for params in (SEEDED, GREEDY):
        run(tight, CODE, params, 40)
    tight.run()
    assert tight.scheduler.stats().requests_preempted > 0
    for request in expected:
        assert tight.replies[request].tokens == calm.replies[request].tokens


def test_two_ranks_pick_alike(tiny: LoadedModel, checkpoint: Path) -> None:
    settings = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefix_cache_gib=0.0)
    world = TensorParallelWorld.load(tiny, checkpoint, settings, 2)
    for rank in world.ranks:
        rank.engine.offer_grammars(vocabulary(rank.engine.vocab_size))
    requests = [run(world, grammar, SEEDED) for grammar in (OBJECT, CODE)]
    replies = world.run()
    assert all(replies[request].reason == "eos" for request in requests)


class Broken(Vocabulary):
    """Raises for one grammar what no code of ours raises."""

    def parser(self, source: str, *args: int) -> Any:
        if source == CODE.source:
            raise MemoryError
        return super().parser(source, *args)


def test_a_compiler_that_raises_ends_its_own_request_alone(make_world: Callable[..., World]) -> None:
    """vllm PR 47312: a grammar that had passed admission failed to compile, and the scheduler ended every request."""
    world = make_world()
    special = frozenset({END, OTHER_END, THINK_END})
    world.engine.offer_grammars(Broken(PIECES, special, frozenset(), world.engine.vocab_size, END))
    broken, fine, free = run(world, CODE, GREEDY), run(world, OBJECT, GREEDY), run(world, None, GREEDY, 20)
    replies = world.run()
    assert (replies[broken].reason, replies[broken].tokens) == ("error", [])
    assert "MemoryError" in replies[broken].error
    assert replies[fine].reason == "eos"
    assert len(replies[free].tokens) == 20
