"""Before READY: run the shapes that will be served, and see whether a row's bits depend on its neighbours.

A request is run alone with its prompt in one piece, then again with every other slot busy and its prompt in uneven
chunks. Token ids, log-probabilities and drafts must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dgpp_core.engine.engine import Engine
from dgpp_core.engine.operations import Begin, Decode, Operation, Prefill, Release, SlotResult
from dgpp_core.sampling.params import GREEDY

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
    room = min(geometry.context, geometry.blocks // geometry.slots * geometry.block_tokens - geometry.slack)
    length = max(1, min(chunk, room - STEPS * geometry.step_width - 1))
    prompt = torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()
    alone = _run(engine, {0: [length]}, prompt)[0]
    cuts = {slot: _cuts(length, slot) for slot in range(geometry.slots)}
    together = _run(engine, cuts, prompt)
    return all(reply == alone for reply in together.values())


def _cuts(length: int, slot: int) -> list[int]:
    """Chunk lengths of a prompt, other ones for every slot; slot 0 keeps it whole."""
    first = min(length, 1 + 13 * slot) if slot else length
    return [n for n in (first, (length - first) // 3, length - first - (length - first) // 3) if n > 0]


def _run(engine: Engine, cuts: dict[int, list[int]], prompt: Sequence[int]) -> dict[int, list[object]]:
    """Prefill the prompt in each slot by its cuts, then decode all slots together; what each slot committed."""
    geometry = engine.geometry
    per_slot = geometry.blocks // geometry.slots
    operations: list[Operation] = []
    for slot, chunks in cuts.items():
        blocks = tuple(
            range(1 + slot * per_slot, 1 + min((slot + 1) * per_slot, slot * per_slot + geometry.table_width))
        )
        operations.append(Begin(slot, slot, tuple(prompt), GREEDY, LOGPROBS, blocks, 0))
        start = 0
        for count in chunks:
            operations.append(Prefill(slot, start, count, start + count == len(prompt)))
            start += count
    replies: dict[int, list[object]] = {slot: [] for slot in cuts}
    results: list[SlotResult] = []
    for step in range(STEPS):
        results += engine.execute(step, operations).slots
        operations = [Decode(tuple(cuts), engine.depth)]
    for result in results:
        replies[result.slot] += [result.tokens, result.logprobs]
    engine.execute(STEPS, [Release(slot) for slot in cuts])
    return replies
