"""Before READY: run the shapes that will be served, and see whether a row's bits depend on its neighbours.

A request is run alone with its prompt in one piece, then again with every other slot busy and its prompt in uneven
chunks. Token ids and log-probabilities must be the same to the bit.

A kernel is compiled when it first meets a kind of shape, which must not happen while requests wait: `warm` brings every
kind of shape past it before.
"""

from __future__ import annotations

import torch

from dgpp_core.engine.engine import Engine
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release
from dgpp_core.sampling.params import GREEDY
from dgpp_core.text.grammar.spec import Grammar

STEPS = 3
LOGPROBS = 20


def rehearse(engine: Engine, chunk: int, vocab_size: int) -> bool:
    """Run the rehearsal and leave the engine empty.

    Args:
        chunk: the largest prefill chunk that will be admitted; clamped to the pool.

    Returns:
        whether every row's bits were independent of its neighbours.
    """
    geometry = engine.geometry
    slots = _slots(engine)
    room = geometry.blocks // slots * geometry.block_tokens - geometry.slack
    length = max(1, min(chunk, geometry.context, room) - STEPS * geometry.step_width - 1)
    prompt = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()
    alone = _run(engine, {0: [prompt]})
    thirds = [prompt[:1], prompt[1 : 1 + length // 3], prompt[1 + length // 3 :]]
    company = {slot: [prompt[-1 - slot % length :]] for slot in range(1, slots)}
    return _run(engine, {0: [part for part in thirds if part], **company}) == alone


def warm(engine: Engine, chunk: int) -> None:
    """Run prefill chunks of every kind of row count up to ``chunk``, and a step after each; the engine is left empty.

    Kernels may be special for one row, for multiples of their tiles and for counts that are not, so each power of two
    is run, and one more than it. Where replies can be held to grammars, these are, to one that allows everything.
    """
    geometry = engine.geometry
    grammar = Grammar(source="", ends=()) if engine.constraints.offered else None
    most = max(1, min(chunk, geometry.context, geometry.blocks * geometry.block_tokens - geometry.slack))
    counts = {most} | {min(most, (1 << power) + more) for power in range(most.bit_length()) for more in (0, 1)}
    for count in sorted(counts):
        blocks = tuple(range(1, 1 + -(-(count + geometry.slack) // geometry.block_tokens)))
        begin = Begin(0, 0, (1,) * count, GREEDY, -1, blocks, 0, grammar=grammar)
        engine.execute(0, [begin, Prefill(0, 0, count, True), Decode((0,), engine.depth), Release(0)])


def _slots(engine: Engine) -> int:
    """Slots that the pool can give the rows of a rehearsal."""
    geometry = engine.geometry
    rows = 1 + STEPS * geometry.step_width + geometry.slack
    return min(geometry.slots, geometry.blocks // -(-rows // geometry.block_tokens))


def _run(engine: Engine, prompts: dict[int, list[list[int]]]) -> list[object]:
    """Prefill each slot's prompt chunk by chunk, then decode all slots together; what slot 0 committed."""
    geometry = engine.geometry
    per_slot = min(geometry.blocks // _slots(engine), geometry.table_width)
    operations: list[Operation] = []
    for slot, chunks in prompts.items():
        blocks = tuple(range(1 + slot * per_slot, 1 + (slot + 1) * per_slot))
        whole = tuple(token for chunk in chunks for token in chunk)
        operations.append(Begin(slot, slot, whole, GREEDY, LOGPROBS, blocks, 0))
        start = 0
        for chunk in chunks:
            operations.append(Prefill(slot, start, len(chunk), start + len(chunk) == len(whole)))
            start += len(chunk)
    committed: list[object] = []
    for step in range(STEPS):
        result = engine.execute(step, operations)
        committed += [(r.tokens, r.logprobs) for r in result.slots if r.slot == 0]
        operations = [Decode(tuple(prompts), engine.depth)]
    engine.execute(STEPS, [Release(slot) for slot in prompts])
    return committed
