"""The conformance kit for a draft layer that runs over its own output: against its equations, in every kind of step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
import torch
from torch import Tensor

from dgpp_core.api import StepBatch
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.world import World

DEPTH = 5


class Equations(Protocol):
    """The model and its draft layer over one whole text, in float64."""

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """The target's hidden states after its last norm, ``[len(tokens), H]``."""
        ...

    def drafted(self, hidden: Tensor, following: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The draft layer's output before its last norm and after it; of each row the token that follows it."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's."""
        ...


class DraftLayerConformance:
    """On a random checkpoint of the tiny config.

    Attributes:
        model: the name of the `ModelSpec`.
        tolerance: largest error against the largest value.
    """

    model: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5
    tokens: ClassVar[list[int]] = torch.randint(512, (40,), generator=torch.Generator().manual_seed(9)).tolist()

    def equations(self, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Equations:
        """Of a checkpoint's tensors and its config.json; shares no code with the model under test."""
        raise AssertionError("a conformance test must override `equations`")

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> LoadedModel:
        """The model and its hooks."""
        return load_plugins(environ={}).model(cls.model)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random checkpoint, float32."""
        path, raw = tmp_path_factory.mktemp(cls.model), loaded.spec.tiny_config
        synthesise(loaded.spec, loaded.bindings(loaded.read_config(raw)), raw, path, seed=11, dtype="F32")
        return path

    @pytest.fixture
    def world(self, loaded: LoadedModel, folder: Path) -> World:
        """An engine that drafts."""
        settings = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=True, mtp_depth=DEPTH)
        return World.from_checkpoint(loaded, folder, settings)

    @pytest.fixture
    def plain(self, folder: Path) -> Equations:
        """The checkpoint's equations."""
        from safetensors.torch import load_file

        return self.equations(load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))

    def relative(self, found: Tensor, wanted: Tensor) -> float:
        """The largest error, against the largest value."""
        return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()

    def batch(self, start: int, count: int, *, decode: bool) -> StepBatch:
        """Rows of a text whose blocks are 1, 2, 3, ..."""
        at = torch.arange(start, start + count)
        return StepBatch(
            tokens=torch.tensor(self.tokens)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
            lengths=torch.tensor([start]), block_tables=torch.arange(1, 5)[None], candidates=torch.tensor([0]),
            keep_rows=decode, max_length=start + count,
        )  # fmt: skip

    @torch.inference_mode()
    def observed(self, world: World, counts: list[int], *, decode: bool) -> Tensor:
        """The drafter's hidden states of all rows but the last, run so many a step."""
        drafter, pools, rows, start = world.engine.drafter, world.engine.state.pools, [], 0
        assert drafter is not None
        for count in counts:
            batch = self.batch(start, count, decode=decode)
            hidden = world.engine.model.forward(batch, pools)
            following = torch.tensor(self.tokens[start + 1 : start + count + 1])
            rows.append(drafter.observe(batch, hidden, following, pools))
            start += count
        return torch.cat(rows)

    @torch.inference_mode()
    def proposed(self, world: World) -> list[int]:
        """Drafts after the whole text."""
        drafter, own = world.engine.drafter, self.observed(world, [39], decode=False)[-1:]
        assert drafter is not None
        tail, committed = self.batch(38, 1, decode=True), torch.tensor(self.tokens[39:])
        (drafts,) = drafter.propose(tail, own, committed, DEPTH, world.engine.state.pools).tolist()
        return [int(draft) for draft in drafts]

    def chain(self, plain: Equations, *, normed: bool = True) -> list[int]:
        """The same by the equations: each deeper draft of the layer's own output, after its last norm or before it."""
        hidden, following, wanted = plain.hidden(self.tokens[:-1]), self.tokens[1:], list[int]()
        for _ in range(DEPTH):
            both = plain.drafted(hidden, following)
            wanted.append(int(plain.logits(both[1])[-1].argmax()))
            hidden, following = torch.cat((hidden, both[int(normed)][-1:])), [*following, wanted[-1]]
        return wanted

    def test_equals_its_equations_in_prefill_and_step_by_step(self, world: World, plain: Equations) -> None:
        """Rows and what the head says of them; the same bits in chunks and one by one."""
        _, normed = plain.drafted(plain.hidden(self.tokens[:-1]), self.tokens[1:])
        whole = self.observed(world, [39], decode=False)
        assert self.relative(whole, normed) < self.tolerance
        assert self.relative(world.engine.model.logits(whole), plain.logits(normed)) < self.tolerance
        assert torch.equal(self.observed(world, [1] * 39, decode=True), whole)
        assert torch.equal(self.observed(world, [7, 16, 16], decode=False), whole)

    def test_deeper_drafts_run_over_the_layers_own_output(self, world: World, plain: Equations) -> None:
        """As transformers does it: after the layer's last norm."""
        assert self.proposed(world) == self.chain(plain)
