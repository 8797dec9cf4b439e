"""Executes the scheduler's operations: one rank's model, state and sampler.

Positions, last tokens, drafts and recurrent candidates of every slot are device tensors, so a step is launched before
the host has read the one before it. What the host must know of a slot, how far it may have come, it keeps as an upper
bound, corrected as results are read.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from dgpp_core.api import Confident, Drafter, EngineError, Model, PluginError, Seeing, StateGroup, Vision
from dgpp_core.engine.constraints import Constraints, Look
from dgpp_core.engine.geometry import Geometry, snapshot_bytes
from dgpp_core.engine.graphs import StaticRunner
from dgpp_core.engine.operations import (
    Begin,
    Decode,
    Extend,
    Operation,
    Prefill,
    Release,
    SlotResult,
    Snapshot,
    StepResult,
    TokenLogprobs,
)
from dgpp_core.engine.pending import Mode, Part, Pending, SlotInfo
from dgpp_core.engine.program import DecodeProgram, tail_of
from dgpp_core.engine.prompts import prompt_batch, rounds, successors
from dgpp_core.engine.registers import Registers
from dgpp_core.engine.runner import EagerRunner, Runner, Step
from dgpp_core.engine.sight import Places, Sight
from dgpp_core.engine.state import StatePools
from dgpp_core.engine.transfer import Download, Incoming, upload
from dgpp_core.images.picture import Picture
from dgpp_core.ops.pick import greedy
from dgpp_core.ops.step import pack, values_of
from dgpp_core.sampling.device import LEAST_VOCABULARY, agrees_with_the_host
from dgpp_core.sampling.pick import Picks, Sampler
from dgpp_core.text.grammar.vocabulary import Vocabulary

_log = logging.getLogger(__name__)


class Engine:
    """One rank's engine.

    Args:
        vocab_size: rows of the output head.
        drafter: proposes ``depth`` tokens a step, or None.
        depth: rows beyond the first that a decode step verifies; 0 without a drafter.
        check: `Bus.check` of the model's bus. It is asked when results have been read and before they are used: a
            kernel that gave up on another rank leaves behind whatever was there.
        in_files: the model's tables that stay in the checkpoint's files: a GPU does not see whether what it reads of
            them are numbers.

    Attributes:
        rows_first: a step's rows go to the device before the host reads the step before and begins the masks: a GPU
            computes meanwhile. A CPU would be done with the rows first, and has masks made beside them.
    """

    def __init__(
        self,
        model: Model,
        drafter: Drafter | None,
        groups: Sequence[StateGroup],
        geometry: Geometry,
        *,
        vocab_size: int,
        depth: int,
        device: torch.device,
        check: Callable[[], None] = lambda: None,
        in_files: Sequence[str] = (),
    ) -> None:
        self.model, self.drafter, self.depth = model, drafter, depth if drafter else 0
        self.geometry, self.device, self.vocab_size = geometry, device, vocab_size
        self.state = StatePools(groups, geometry, device)
        self.sampler = Sampler(vocab_size, geometry.slots, device)
        self.constraints = Constraints(None, device)
        self.registers = Registers(geometry, self.depth, device)
        self.program = DecodeProgram(model, drafter, self.state.pools, self.registers)
        self.program.samples = device.type == "cuda" and self._device_samples()
        self.runner: Runner = EagerRunner(self.program, device)
        self.sight: Sight | None = None
        self._places: Places | None = None
        self.slots: dict[int, SlotInfo] = {}
        self._unread: deque[Pending] = deque()
        self._check = check
        also = f", and the tables in its files, which are not looked through: {', '.join(in_files)}" if in_files else ""
        self._not_finite_hint = "check the model's weights and kernels" + also
        self.rows_first = device.type == "cuda"

    def _device_samples(self) -> bool:
        """Whether sampled tokens can be picked on the GPU as the host would pick them."""
        if self.vocab_size < LEAST_VOCABULARY:
            return False
        if agrees_with_the_host(self.vocab_size, self.device):
            return True
        _log.warning("the device's exponential rounds otherwise than torch's: the host picks sampled tokens, slower")
        return False

    def offer_grammars(self, vocabulary: Vocabulary) -> None:
        """Let replies be held to grammars of these tokens, which has to come before any request."""
        self.constraints = Constraints(vocabulary, self.device)

    def offer_sight(self, vision: Vision) -> None:
        """Let prompts have images, which has to come before any request and before `use_graphs`.

        Raises:
            PluginError: the model cannot encode any.
        """
        if not isinstance(self.model, Seeing):
            what = "the plugin says how its model takes images, and the model cannot see"
            raise PluginError(what, found=f"{type(self.model).__name__} without `see`", expected="dgpp_core.api.Seeing")
        self.sight = Sight(self.model, vision, self.device)
        if vision.positions == "grid":
            positions = self.geometry.context + self.geometry.slack
            self._places = Places(vision, self.geometry.slots, positions, self.device)
            self.registers.places = self._places.table

    def look(self, pictures: Sequence[Picture]) -> str:
        """Why a request with these images cannot be served; empty where it can."""
        if not pictures:
            return ""
        return "this engine takes no images" if self.sight is None else self.sight.fault(pictures)

    @property
    def needs_snapshot(self) -> bool:
        """Whether a prefix can only be reused where its window and recurrent state was kept."""
        return snapshot_bytes(self.state.groups, self.geometry.step_width) > 0

    @property
    def confident(self) -> bool:
        """Whether steps say how sure the drafter is of what it drafted."""
        return isinstance(self.drafter, Confident)

    @property
    def decode_rows_match_prefill(self) -> bool:
        """Whether decode and prefill rows have the same bits: one kernel for both on a CPU, two on a GPU."""
        return self.device.type == "cpu"

    @property
    def tables(self) -> Tensor:
        """Block tables by slot, int64 ``[slots + 1, table_width]``."""
        return self.registers.tables

    @property
    def drafts(self) -> Tensor:
        """Proposed tokens by slot, int64 ``[slots + 1, depth]``."""
        return self.registers.drafts

    @torch.inference_mode()
    def use_graphs(self, depths: Sequence[int] = (), *, capture: bool = True) -> Iterator[str]:
        """Run decode steps from static buffers from now on, captured into graphs on CUDA; yields what it works on.

        Args:
            depths: draft depths that steps may have; by default the engine's own.
            capture: without it the buffers are used and nothing is captured, to tell one from the other.

        Raises:
            EngineError: a shape cannot be captured.
        """
        # A drafter that recurses goes on for less than a step's width past the verified rows.
        length = self.geometry.context + self.geometry.slack - self.geometry.step_width
        runner = StaticRunner(self.program, self.geometry.slots, depths or [self.depth], length, self.device)
        if capture and self.device.type == "cuda":
            yield from runner.capture()
        self.runner = runner

    def release(self) -> None:
        """Give captured steps back: a library's communicator waits at its end for graphs that have its kernels."""
        if isinstance(self.runner, StaticRunner) and self.device.type == "cuda":
            self.runner.release()

    def execute(self, tick: int, operations: Sequence[Operation]) -> StepResult:
        """Run one tick's operations in order and wait for what they commit.

        Raises:
            EngineError: an operation breaks its contract, a row has no finite logit, or a collective has failed.
        """
        return self.launch(tick, operations).wait()

    @torch.inference_mode()
    def launch(self, tick: int, operations: Sequence[Operation]) -> Pending:
        """Hand one tick's operations to the device, in order. Earlier ticks may be unread still.

        The host waits for those first where it has to pick a token itself: it needs to know what came before.

        Raises:
            EngineError: an operation breaks its contract, or, where results had to be read, as `Pending.wait`.
        """
        parts: list[Part] = []
        for kind, run in groupby(operations, type):
            if kind is Prefill:
                for together in rounds([op for op in run if isinstance(op, Prefill)]):
                    parts += self._prefill(together)
                continue
            for op in run:
                if isinstance(op, Decode):
                    parts.append(self._decode(op))
                else:
                    self._arrange(op)
        pending = Pending(tick, tuple(parts), self._settle)
        self._unread.append(pending)
        return pending

    @torch.inference_mode()
    def _settle(self, last: Pending | None = None) -> None:
        """Read outstanding ticks in order, up to ``last``."""
        while self._unread and (last is None or last.result is None):
            pending = self._unread[0]
            slots = [result for part in pending.parts for result in self._read(part)]
            pending.result = StepResult(tick=pending.tick, slots=tuple(slots))
            self._unread.popleft()

    def _read(self, part: Part) -> Iterator[SlotResult]:
        """What a part committed; the bounds of its requests become exact by it."""
        rows = part.download.values()
        self._check()
        for at, (info, row) in enumerate(zip(part.requests, rows, strict=True)):
            picked, (accepted, fault, length), sure = row[: part.width], row[part.width :][:3], row[part.width + 3 :]
            if fault < part.width:
                raise EngineError(
                    "the logits have no finite largest value",
                    where=f"slot {info.slot}, position {length + 1 + fault}",
                    expected="at least one finite logit, no NaN and no +inf",
                    hint=self._not_finite_hint,
                )
            count = accepted + 1
            tokens = tuple(picked[:count])
            info.bound -= part.width - count
            broken = ""
            if self.slots.get(info.slot) is info:
                self.sampler.commit(info.slot, tokens)
                broken = self.constraints.commit(info.slot, tokens)
            logprobs = None
            if info.logprobs:
                first = at * part.width
                logprobs = tuple(p or TokenLogprobs(0.0) for p in part.logprobs[first : first + count])
            yield SlotResult(info.slot, info.request, tokens, logprobs, part.drafted, broken, values_of(sure))

    def _arrange(self, op: Operation) -> None:
        match op:
            case Begin():
                self._begin(op)
            case Extend(slot=slot, blocks=blocks):
                info = self._info(slot)
                end = info.blocks + len(blocks)
                if end > self.geometry.table_width:
                    raise EngineError(
                        f"slot {slot} would have {end} blocks", expected=f"<= {self.geometry.table_width}"
                    )
                self.registers.extend(slot, info.blocks, upload(blocks, self.device))
                info.blocks = end
            case Snapshot(slot=slot, arena=arena, position=position):
                self._info(slot)
                held = self.registers
                self.state.save(slot, held.candidates, arena, (held.lengths, position) if position >= 0 else None)
            case Release(slot=slot):
                del self.slots[slot]
                self.registers.release(slot)
                self.sampler.release(slot)
                self.constraints.release(slot)
            case _:
                raise EngineError(f"unknown operation {type(op).__name__}")

    def _begin(self, op: Begin) -> None:
        if op.slot in self.slots:
            raise EngineError(f"slot {op.slot} is taken", found=f"request {self.slots[op.slot].request}")
        tail = self.geometry.prefill_tail
        self.slots[op.slot] = SlotInfo(
            op.slot, op.request, op.prompt, op.logprobs >= 0, 0, op.cached, pictures=op.pictures,
            floor=max(0, len(op.prompt) - op.replied - tail) if tail else 0,
        )  # fmt: skip
        if self._places is not None:
            self._places.begin(op.slot, op.pictures)
        self._arrange(Extend(op.slot, op.blocks))
        self.registers.begin(op.slot, op.cached)
        self.state.clear(op.slot)
        if op.arena >= 0:
            self.state.load(op.arena, op.slot)
        self.sampler.begin(op.slot, op.params, op.prompt, op.logprobs)
        self.constraints.begin(op.slot, op.grammar, op.prompt[len(op.prompt) - op.replied :])
        row = self.sampler.device_row(op.slot)
        if row is not None and not any(row):
            self.slots[op.slot].mode = "greedy"
        elif row is not None and self.program.samples:
            self.slots[op.slot].mode = "device"
            self.registers.ways[op.slot] = upload(row, self.device)

    def _info(self, slot: int) -> SlotInfo:
        if slot not in self.slots:
            raise EngineError(f"slot {slot} holds no request")
        return self.slots[slot]

    def _prefill(self, ops: list[Prefill]) -> list[Part]:
        infos = [self._info(op.slot) for op in ops]
        for op, info in zip(ops, infos, strict=True):
            self._check_rows(info, op.start + op.count)
            if info.bound != op.start or op.start + op.count > len(info.prompt):
                raise EngineError(f"prefill of slot {op.slot} at {op.start}", expected=f"start {info.bound}")
        batch = prompt_batch(ops, infos, self.registers, self.device, self.sight)
        hidden = self.model.forward(batch, self.state.pools)
        for op, info in zip(ops, infos, strict=True):
            info.bound = op.start + op.count
            self.registers.begin(op.slot, info.bound)
        ends = batch.last_rows()
        last = [at for at, op in enumerate(ops) if op.last]
        if not last and self.drafter is None:
            return []
        rows, slots = upload([ends[at] for at in last], self.device), upload([ops[at].slot for at in last], self.device)
        parts = [self._first_tokens(hidden[rows], slots, [infos[at] for at in last])] if last else []
        if self.drafter is not None:
            next_tokens = upload(successors(ops, infos), self.device)
            next_tokens[rows] = self.registers.last_tokens[slots]
            own = self.drafter.observe(batch, hidden, next_tokens, self.state.pools)
            if last:
                segments = upload(last, self.device)
                tail = tail_of(
                    batch.tokens[rows], batch.positions[rows], slots, batch.block_tables[segments],
                    batch.candidates[segments], batch.max_length, batch.places,
                )  # fmt: skip
                tokens = self.registers.last_tokens[slots]
                self.program.draft(self.drafter, tail, own[rows], tokens)
        return parts

    def _first_tokens(self, hidden: Tensor, slots: Tensor, infos: list[SlotInfo]) -> Part:
        """Pick the token after each prompt; ``hidden`` is each one's last row."""
        logits = self.model.logits(hidden)
        tokens, fine = greedy(logits)
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        modes, held = {info.mode for info in infos}, [info.slot for info in infos]
        if (look := self.constraints.look(held)) is not None:
            self.program.restrict(logits, tokens, fine, look.masks())
        if "host" in modes:
            self._settle()
            picks = self._pick(logits, held, [info.bound for info in infos])
            tokens, logprobs = picks.tokens, picks.logprobs
        elif "device" in modes:
            self.program.sample(logits, tokens, slots, self.registers.lengths[slots] - 1)
        self.registers.last_tokens[slots] = tokens
        results = pack(
            tokens.unsqueeze(1), torch.zeros_like(tokens), fine.unsqueeze(1), self.registers.lengths[slots] - 1
        )
        return Part(tuple(infos), Download(results), 1, 0, logprobs)

    def _decode(self, op: Decode) -> Part:
        width, infos = op.depth + 1, [self._info(slot) for slot in op.slots]
        if op.depth > self.depth:
            raise EngineError(f"a step of depth {op.depth}", expected=f"<= {self.depth}")
        for info in infos:
            self._check_rows(info, info.bound + width)
        length, modes = max(info.bound for info in infos) + width, {info.mode for info in infos}
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        if "host" in modes or any(map(self.constraints.hold, op.slots)):
            incoming, logprobs = self._decode_with_the_host(op, infos, length, modes)
        else:
            incoming = self.runner.step(op.slots, op.depth, length, sampled="device" in modes)
        for info in infos:
            info.bound += width
        return Part(tuple(infos), incoming, width, op.depth, logprobs)

    def _decode_with_the_host(
        self, op: Decode, infos: list[SlotInfo], length: int, modes: set[Mode]
    ) -> tuple[Incoming, tuple[TokenLogprobs | None, ...]]:
        """A step in which the host picks, or makes masks; and what it says of its picks."""
        drafts = self._drafts_of(op)
        look = None if self.rows_first else self._look(op, drafts)
        step = self.runner.verify(op.slots, op.depth, length)
        if self.rows_first:
            look = self._look(op, drafts)
        if look is not None:
            step.restrict(look.masks())
        if "host" in modes:
            self._settle()
            picks = self._sample(step, infos, op.depth + 1)
            return step.commit(picks.tokens), picks.logprobs
        if "device" in modes:
            step.sample()
        return step.commit(None), ()

    def _drafts_of(self, op: Decode) -> Download | None:
        """The drafts that a step verifies, on their way to the host, where masks will be asked for behind them."""
        if not op.depth or not any(map(self.constraints.hold, op.slots)):
            return None
        return Download(self.registers.drafts[upload(op.slots, self.device)])

    def _look(self, op: Decode, drafts: Download | None) -> Look | None:
        """Begin the masks of a step, if one of its replies is held to a grammar, from all that came before it."""
        if not any(map(self.constraints.hold, op.slots)):
            return None
        self._settle()
        rows = None if drafts is None else [row[: op.depth] for row in drafts.values()]
        return self.constraints.look(op.slots, rows)

    def _sample(self, step: Step, infos: list[SlotInfo], width: int) -> Picks:
        """Picks by the host's sampler; everything before the step has been read, so the bounds are exact."""
        slots = [info.slot for info in infos for _ in range(width)]
        positions = [info.bound + 1 + row for info in infos for row in range(width)]
        assumed = [row[:i] for row in step.drafts.tolist() for i in range(width)] if width > 1 else None
        return self._pick(step.logits, slots, positions, assumed)

    def _pick(
        self,
        logits: Tensor,
        slots: Sequence[int],
        positions: Sequence[int],
        assumed: Sequence[Sequence[int]] | None = None,
    ) -> Picks:
        """The host's picks; where a collective has failed that is the error, whatever the rows look like."""
        try:
            return self.sampler.pick(logits, slots, positions, assumed)
        finally:
            self._check()

    def _check_rows(self, info: SlotInfo, end: int) -> None:
        covered = info.blocks * self.geometry.block_tokens
        if end > covered:
            what = f"slot {info.slot} would write rows up to {end}"
            raise EngineError(what, expected=f"<= {covered}, its block table")
