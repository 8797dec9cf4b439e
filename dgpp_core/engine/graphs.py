"""Decode steps from static buffers, captured into CUDA graphs.

A *family* is a decode shape: so many segments of 1 + depth rows. A step runs in the smallest family that holds its
requests; the segments left over are inert. Where the device can pick for every request, a step is one graph: of a
family there is one that takes the likeliest tokens and one that samples where a request does. Else it is up to three:
the first ends with the logits and the likeliest tokens, the second replaces those where a request samples, the third
commits whatever picks are there and drafts anew. Replies that are held to grammars are masked before the second, and
the host picks before the third.

All that a step needs from the host is which slots take part. The rest is gathered on the device from the registers.

On a CPU the same buffers and the same code run without capture, so that they can be tested anywhere.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.engine.families import family_sizes, require_families
from dgpp_core.engine.program import DecodeProgram, Verified
from dgpp_core.engine.runner import Step
from dgpp_core.engine.transfer import Download, Incoming, Posts, upload

WARM_STEPS = 2

Mark = Callable[[str], None]
"""Called on the host as a step's device work is queued: ``begin`` before its first kernel, ``end`` after its last."""


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: what an old engine's buffers do as they go would end a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Family:
    """One decode shape with its buffers.

    Args:
        segments: requests it has room for.
        width: rows a request.
        max_length: bound on the positions + 1 of any request.
    """

    def __init__(
        self, program: DecodeProgram, segments: int, width: int, max_length: int, device: torch.device
    ) -> None:
        self.segments, self.width = segments, width
        self._program, self._max_length, self._device = program, max_length, device
        self._inert = program.registers.inert
        self._held: tuple[int, ...] = (self._inert,) * segments
        self._slots = torch.full((segments,), self._inert, dtype=torch.int64, device=device)
        self._posts = Posts(segments, width, device) if device.type == "cuda" and program.posts else None
        self._results: Tensor | None = None
        self._verified: Verified | None = None
        self._graphs: dict[str, torch.cuda.CUDAGraph] = {}
        self._captured: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.segments} requests of {self.width} rows"

    def capture(self, pool: Any) -> None:
        """Compile what the shape needs and capture its graphs; every segment is inert meanwhile.

        Args:
            pool: handle of the memory that all families share.

        Raises:
            EngineError: naming the family.
        """
        try:
            parts = {"verify": self._verify, "sample": self._sample, "commit": self._commit}
            if not self._program.samples:
                del parts["sample"]
            for _ in range(WARM_STEPS):
                for part in parts.values():
                    part()
            torch.cuda.synchronize(self._device)
            whole = {"sampled": self._sampled} if self._program.samples else {}
            # The whole steps come first: what they leave in `_verified` must not be what the single parts go on from.
            for name, part in {"greedy": self._greedy, **whole, **parts}.items():
                self._graphs[name] = torch.cuda.CUDAGraph()
                with _uncollected(), torch.cuda.graph(self._graphs[name], pool=pool, capture_error_mode="thread_local"):
                    part()
                if name in ("greedy", "sampled", "commit") and self._results is not None:
                    self._captured[name] = self._results
        except Exception as error:
            self._graphs.clear()
            raise EngineError(
                "a decode graph cannot be captured",
                where=self.name,
                found=f"{type(error).__name__}: {error}",
                expected="a forward without host reads of device values",
                hint="set decode_graph to false to serve without graphs, and report this",
            ) from error
        if self._posts is not None:
            self._posts.reset()

    def release(self) -> None:
        """Give the graphs back."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._captured.clear()

    def take(self, slots: Sequence[int]) -> None:
        """The requests of the next step."""
        wanted = (*slots, *(self._inert for _ in range(self.segments - len(slots))))
        if wanted != self._held:
            self._slots.copy_(upload(wanted, self._device), non_blocking=True)
            self._held = wanted

    def run_verify(self) -> Verified:
        """The first half of a step, for the slots in the buffer."""
        self._run("verify", self._verify)
        assert self._verified is not None
        return self._verified

    def restrict(self, masks: Tensor) -> None:
        """Between the halves, in front of `run_sample`: the first rows are held to masks.

        Not captured: the kernels are queued while those of the first half run, so that the device waits for neither.
        """
        step, rows = self._verified, len(masks)
        assert step is not None
        self._program.restrict(step.logits[:rows], step.picked[:rows], step.fine[:rows], masks)

    def run_sample(self) -> None:
        """Between the halves: the device picks for the slots that sample."""
        self._run("sample", self._sample)

    def run_commit(self, picked: Tensor | None = None) -> None:
        """The second half; ``picked`` holds the first rows' tokens, by default the greedy ones of all."""
        if picked is not None and self._verified is not None:
            self._verified.picked[: len(picked)].copy_(picked, non_blocking=True)
        if self._posts is not None:
            self._posts.make_room()
        self._run("commit", self._commit)

    def run_whole(self, sampled: bool) -> None:
        """All of a step; ``sampled``: the device picks for the slots that sample."""
        if self._posts is not None:
            self._posts.make_room()
        self._run("sampled" if sampled else "greedy", self._sampled if sampled else self._greedy)

    def results(self, live: int) -> Incoming:
        """What the step that was run last came to, of its first ``live`` requests."""
        if self._posts is not None:
            return self._posts.newest(live)
        assert self._results is not None
        return Download(self._results[:live])

    def _run(self, name: str, part: Callable[[], None]) -> None:
        if name in self._graphs:
            self._graphs[name].replay()
            self._results = self._captured.get(name, self._results)
        else:
            part()

    def _verify(self) -> None:
        self._verified = self._program.verify(self._slots, self.width, self._max_length)

    def _sample(self) -> None:
        step = self._verified
        assert step is not None
        self._program.sample(step.logits, step.picked, step.batch.slots, step.batch.positions)

    def _commit(self) -> None:
        assert self._verified is not None
        outbox = None if self._posts is None else self._posts.outbox
        self._results = self._program.commit(self._verified, outbox)

    def _greedy(self) -> None:
        self._verify()
        self._commit()

    def _sampled(self) -> None:
        self._verify()
        self._sample()
        self._commit()


class StaticStep:
    """See `Step`: the live part of a family's buffers."""

    def __init__(self, family: Family, live: int, mark: Mark | None) -> None:
        self._family, self._live, self._mark = family, live, mark
        self._verified = family.run_verify()

    @property
    def logits(self) -> Tensor:
        return self._verified.logits[: self._live * self._family.width]

    @property
    def drafts(self) -> Tensor:
        return self._verified.drafts[: self._live]

    def restrict(self, masks: Tensor) -> None:
        self._family.restrict(masks)

    def sample(self) -> None:
        self._family.run_sample()

    def commit(self, picked: Tensor | None) -> Incoming:
        self._family.run_commit(picked)
        if self._mark is not None:
            self._mark("end")
        return self._family.results(self._live)


class StaticRunner:
    """Runs every step in a family's buffers.

    Args:
        slots: most requests of a step.
        depths: draft depths that steps may have.
        max_length: bound on the positions + 1 of any request.

    Attributes:
        mark: for measuring; see `Mark`.
    """

    def __init__(
        self, program: DecodeProgram, slots: int, depths: Sequence[int], max_length: int, device: torch.device
    ) -> None:
        require_families(slots, depths)
        sizes = family_sizes(slots)
        self._sizes, self._device = sizes, device
        self._families = {
            (size, depth): Family(program, size, depth + 1, max_length, device) for depth in depths for size in sizes
        }
        self.mark: Mark | None = None

    def capture(self) -> Iterator[str]:
        """Capture every family, the largest first: the others fit into its memory. Yields each name; CUDA only."""
        pool = torch.cuda.graph_pool_handle()
        for family in sorted(self._families.values(), key=lambda f: -f.segments * f.width):
            yield family.name
            family.capture(pool)

    def release(self) -> None:
        """Give all graphs back; steps run as they come from now on."""
        torch.cuda.synchronize(self._device)
        for family in self._families.values():
            family.release()

    def verify(self, slots: Sequence[int], depth: int, max_length: int) -> Step:
        """See `dgpp_core.engine.runner.Runner`; ``max_length`` is the family's own."""
        return StaticStep(self._begun(slots, depth), len(slots), self.mark)

    def step(self, slots: Sequence[int], depth: int, max_length: int, *, sampled: bool) -> Incoming:
        """See `dgpp_core.engine.runner.Runner`; ``max_length`` is the family's own."""
        family = self._begun(slots, depth)
        family.run_whole(sampled)
        if self.mark is not None:
            self.mark("end")
        return family.results(len(slots))

    def _begun(self, slots: Sequence[int], depth: int) -> Family:
        """The family of a step, its buffers filled."""
        size = next(size for size in self._sizes if size >= len(slots))
        family = self._families.get((size, depth))
        if family is None:
            known = ", ".join(str(each) for each in sorted({each for _, each in self._families}))
            raise EngineError("a step of a depth that was not prepared", found=str(depth), expected=f"one of {known}")
        family.take(slots)
        if self.mark is not None:
            self.mark("begin")
        return family
