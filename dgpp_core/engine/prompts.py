"""Prefill operations as rows for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dgpp_core.api import StepBatch
from dgpp_core.engine.operations import Prefill
from dgpp_core.engine.pending import SlotInfo
from dgpp_core.engine.registers import Registers
from dgpp_core.engine.sight import Sight
from dgpp_core.engine.transfer import upload


def rounds(ops: Sequence[Prefill]) -> Iterator[list[Prefill]]:
    """Runs of prefills that share one forward: a slot's next chunk needs its last one's state."""
    together: list[Prefill] = []
    for op in ops:
        if any(op.slot == other.slot for other in together):
            yield together
            together = []
        together.append(op)
    yield together


def prompt_batch(
    ops: Sequence[Prefill],
    infos: Sequence[SlotInfo],
    registers: Registers,
    device: torch.device,
    sight: Sight | None = None,
) -> StepBatch:
    """Prompt rows continuing each slot; their positions are known on the host. ``sight`` makes those of images."""
    tokens = [t for op, i in zip(ops, infos, strict=True) for t in i.prompt[op.start : op.start + op.count]]
    positions = [p for op in ops for p in range(op.start, op.start + op.count)]
    rows = upload([tokens, positions], device)
    segments = upload([[op.slot for op in ops], [op.start for op in ops]], device)
    floors = tuple(info.floor for info in infos)
    return StepBatch(
        tokens=rows[0],
        positions=rows[1],
        counts=tuple(op.count for op in ops),
        slots=segments[0],
        lengths=segments[1],
        block_tables=registers.tables[segments[0]],
        candidates=registers.candidates[segments[0]],
        keep_rows=False,
        max_length=max(positions) + 1,
        seen=sight.seen(ops, infos) if sight is not None else None,
        places=registers.places,
        floors=floors if any(floors) else (),
    )


def successors(ops: Sequence[Prefill], infos: Sequence[SlotInfo]) -> list[int]:
    """The token after each prompt row; 0 after a prompt's last, which is not known yet."""
    following: list[int] = []
    for op, info in zip(ops, infos, strict=True):
        following += info.prompt[op.start + 1 : op.start + op.count + 1]
        following += [0] * op.last
    return following
