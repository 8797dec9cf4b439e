"""The conformance kit: a model family subclasses `ModelConformance` in its tests and runs pytest."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from dgpp_core.api import CheckpointError, StepBatch
from dgpp_core.checkpoint.check import check_bindings
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.operations import Begin, Prefill, Release, Snapshot, TokenLogprobs
from dgpp_core.engine.plan import make_plan
from dgpp_core.engine.rehearsal import rehearse
from dgpp_core.host.loading import LoadedModel, PluginHost, load_plugins
from dgpp_core.sampling.params import GREEDY
from dgpp_core.testing.inspect import resident_tensor_bytes
from dgpp_core.testing.matrix import Axes, exactness_matrix
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import World
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.template import ChatTemplate

SETTINGS = EngineSettings(
    max_concurrency=4, kv_capacity=2048, block_tokens=16, prefix_cache_gib=0.02, prefix_min_tokens=0
)


class ModelConformance:
    """All checks of one model, on a random checkpoint of its tiny config.

    Attributes:
        model: the name of the `ModelSpec`.
        tolerance: relative error allowed between the forward and the reference, in float32.
        template: a chat template file, where the family has one; see `golden_cases`.
        reply_tokens: reply length of the exactness matrix.
        worlds: numbers of tensor-parallel ranks that can divide the tiny config.
    """

    model: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5
    template: ClassVar[Path | None] = None
    reply_tokens: ClassVar[int] = 12
    worlds: ClassVar[tuple[int, ...]] = (1,)

    @classmethod
    def host(cls) -> PluginHost:
        """The plugin host; override to test a plugin that is not installed."""
        return load_plugins(environ=os.environ)

    def reference(self, weights: Mapping[str, Tensor], config: Mapping[str, Any], tokens: Sequence[int]) -> Tensor:
        """Logits ``[len(tokens), vocab_size]`` of a slow forward that shares no code with the model under test.

        Args:
            weights: the checkpoint's tensors by their names there, float32 save for integers.
            config: its config.json.
        """
        raise AssertionError("a conformance test must override `reference`")

    @classmethod
    def golden_cases(cls) -> Mapping[str, Mapping[str, Any]]:
        """What ``template`` renders: by name ``{"messages", "tools", "template_kwargs", "prompt"}``."""
        return {}

    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> LoadedModel:
        """The model and its hooks."""
        return cls.host().model(cls.model)

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A random checkpoint, float32 so that nothing is lost on the way to the reference."""
        path = tmp_path_factory.mktemp(cls.model)
        raw = loaded.spec.tiny_config
        synthesise(loaded.spec, loaded.bindings(loaded.read_config(raw)), raw, path, seed=11, dtype="F32")
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def prompts(cls, loaded: LoadedModel) -> list[list[int]]:
        """Eight prompts of different lengths."""
        vocab = int(loaded.read_config(loaded.spec.tiny_config).vocab_size)
        source = torch.Generator().manual_seed(5)
        return [torch.randint(vocab, (n,), generator=source).tolist() for n in (70, 5, 33, 16, 48, 1, 97, 64)]

    def world(
        self, loaded: LoadedModel, folder: Path, settings: EngineSettings = SETTINGS, lag: int = 0, ranks: int = 1
    ) -> World:
        """A world of ``ranks`` ranks that serves the checkpoint."""
        if ranks > 1:
            return TensorParallelWorld.load(loaded, folder, settings, ranks, lag=lag)
        return World.from_checkpoint(loaded, folder, settings, lag=lag)

    def test_importing_the_plugin_needs_no_torch(self, loaded: LoadedModel) -> None:
        """The front end loads plugins too, and must stay small."""
        from dgpp_core.host.check import imported_libraries

        assert "torch" not in imported_libraries(loaded.plugin)

    def test_every_tensor_is_bound_once_and_taken_once(self, loaded: LoadedModel, folder: Path) -> None:
        """The binding table covers the checkpoint, and building the model takes each parameter."""
        config = loaded.read_config(json.loads((folder / "config.json").read_text()))
        table, entries = loaded.bindings(config), read_headers(folder)
        assert sorted(b.name for b in table.tensors) == sorted(entries)
        for binding in table.tensors:
            rest = {name: entry for name, entry in entries.items() if name != binding.name}
            with pytest.raises(CheckpointError, match=binding.name.replace(".", r"\.")):
                check_bindings(table, rest)
        self.world(loaded, folder)

    def test_the_plan_is_what_is_allocated(self, loaded: LoadedModel, folder: Path) -> None:
        """Planned tensor bytes of a rank are at least those allocated, and within 1 %."""
        config = loaded.read_config(json.loads((folder / "config.json").read_text()))
        for ranks in self.worlds:
            engine = self.world(loaded, folder, SETTINGS, 0, ranks).engine
            plan = make_plan(
                table=loaded.bindings(config), groups=loaded.groups(config, ranks, msgspec.to_builtins(SETTINGS)),
                config=config, settings=SETTINGS,
                world=ranks, device_kind="cpu", step_width=engine.geometry.step_width,
                extra=loaded.plan_terms(config, ranks, {}), available=1 << 40,
            )  # fmt: skip
            allocated = engine.state.bytes + resident_tensor_bytes(engine.model, engine.drafter)
            assert allocated <= plan.tensor_bytes <= math.ceil(allocated * 1.01), f"{ranks} ranks"

    def test_forward_equals_the_reference(self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]) -> None:
        """Logits of a whole prefill, and of the same tokens one by one, against the slow forward."""
        from safetensors.torch import load_file

        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                weights[name] = tensor.float() if tensor.is_floating_point() else tensor
        tokens = prompts[0]
        want = self.reference(weights, json.loads((folder / "config.json").read_text()), tokens)
        scale = want.abs().max()
        for counts in ([len(tokens)], [1] * len(tokens)):
            got = self._logits(self.world(loaded, folder), tokens, counts)
            assert got.shape == want.shape
            assert ((got - want).abs().max() / scale).item() <= self.tolerance

    def _logits(self, world: World, tokens: list[int], counts: list[int]) -> Tensor:
        engine, rows, start = world.engine, [], 0
        engine.execute(0, [Begin(0, 0, tuple(tokens), GREEDY, -1, tuple(range(1, engine.geometry.table_width + 1)), 0)])
        with torch.inference_mode():
            for count in counts:
                at = torch.arange(start, start + count)
                batch = StepBatch(
                    tokens=torch.tensor(tokens)[at], positions=at, counts=(count,), slots=torch.tensor([0]),
                    lengths=torch.tensor([start]), block_tables=engine.tables[:1], candidates=torch.tensor([0]),
                    keep_rows=len(counts) > 1, max_length=start + count,
                )  # fmt: skip
                rows.append(engine.model.logits(engine.model.forward(batch, engine.state.pools)))
                start += count
        return torch.cat(rows)

    def test_rows_are_independent_of_their_neighbours(self, loaded: LoadedModel, folder: Path) -> None:
        """What the engine checks before it says READY."""
        world = self.world(loaded, folder)
        assert rehearse(world.engine, 100, int(loaded.read_config(loaded.spec.tiny_config).vocab_size))

    def test_exactness_matrix(self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]) -> None:
        """Chunking, company, prefix cache, eviction, drafting and pipelining change no token."""
        depths = tuple(range(min(loaded.spec.draft_depth, 3) + 1))
        axes = Axes(depths=depths, thin=True, max_tokens=self.reply_tokens)
        report = exactness_matrix(lambda *each: self.world(loaded, folder, *each), prompts, axes)
        assert not report.differences
        assert report.hits
        assert report.evictions

    def test_ranks_that_share_the_model_give_the_same_replies(
        self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:
        """However many ranks add up a row, and whatever else varies, no token differs; the ranks agree to the bit."""
        if not (shared := [ranks for ranks in self.worlds if ranks > 1]):
            pytest.skip("this model sets no world of several ranks")
        depths = tuple(range(min(loaded.spec.draft_depth, 3) + 1))
        axes = Axes(
            worlds=shared, depths=depths, chunks=(16,), company=(3,), evicting=False, thin=True,
            max_tokens=self.reply_tokens,
        )  # fmt: skip
        report = exactness_matrix(lambda *each: self.world(loaded, folder, *each), prompts, axes)
        assert not report.differences, f"the oracle's picks come as near to a tie as {report.smallest_gap}"

    def test_a_pipelined_engine_gives_the_same_replies(
        self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:
        """A stop that is learned of one step late leaves no trace."""
        axes = Axes(
            depths=(loaded.spec.draft_depth,), lags=(1,), chunks=(16,), company=(3,), thin=True,
            max_tokens=self.reply_tokens,
        )  # fmt: skip
        assert not exactness_matrix(lambda *each: self.world(loaded, folder, *each), prompts, axes).differences

    def test_a_snapshot_restores_what_was_saved(
        self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:
        """A prefix restored into another slot continues as if it had been computed there."""
        world = self.world(loaded, folder)
        engine, prompt = world.engine, tuple(prompts[0])
        cut, span = 32, -(-(len(prompt) + engine.geometry.slack) // engine.geometry.block_tokens)
        blocks, other = tuple(range(1, 1 + span)), tuple(range(1 + span, 1 + 2 * span))
        shared = blocks[: cut // engine.geometry.block_tokens]
        arena = 0 if engine.needs_snapshot else -1
        keep = [Snapshot(0, arena)] if engine.needs_snapshot else []
        first = engine.execute(0, [
            Begin(0, 0, prompt, GREEDY, 20, blocks, 0), Prefill(0, 0, cut, False), *keep,
            Prefill(0, cut, len(prompt) - cut, True),
        ])  # fmt: skip
        again = engine.execute(1, [
            Begin(2, 1, prompt, GREEDY, 20, (*shared, *other[len(shared) :]), cut, arena),
            Prefill(2, cut, len(prompt) - cut, True), Release(2),
        ])  # fmt: skip
        assert first.slots[0].tokens == again.slots[0].tokens
        assert first.slots[0].logprobs == again.slots[0].logprobs

    def test_the_next_turn_goes_on_from_the_reply(
        self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]
    ) -> None:
        """What a reply left behind, drafted or not and pipelined or not, is what reading it gives, to the bit."""
        depth = min(loaded.spec.draft_depth, 2)
        for drafts, lag in {(0, 1), (depth, 0), (depth, 1)}:
            drafting = {"mtp": drafts > 0, "mtp_depth": max(drafts, 1)}
            settings = msgspec.structs.replace(SETTINGS, **drafting)
            world = self.world(loaded, folder, settings, lag)
            first = world.reply(prompts[0], 24)
            turn = [*prompts[0], *first.tokens, 1, 2, 3]
            again = world.reply(turn, 4, logprobs=5)
            cold = self.world(loaded, folder, settings, lag).reply(turn, 4, logprobs=5)
            assert (again.tokens, again.logprobs) == (cold.tokens, cold.logprobs)
            size = SETTINGS.block_tokens
            assert again.cached == (len(turn) - 4) // size * size

    def test_tables_in_files_change_no_bit(self, loaded: LoadedModel, folder: Path, prompts: list[list[int]]) -> None:
        """With `ngram_table` mmap: the same replies, drafted to every depth, in chunks, together and on ranks.

        What is allocated, and planned, is less by the tables.
        """
        config = loaded.read_config(json.loads((folder / "config.json").read_text()))
        if not loaded.bindings(config).lookups:
            pytest.skip("this model has no table that could stay in the checkpoint's files")

        def made(where: Literal["resident", "mmap"], depth: int = 0, ranks: int = 1) -> World:
            drafting = {"mtp": depth > 0, "mtp_depth": max(1, depth), "prefill_budget_tokens": (0, 16)[depth % 2]}
            return self.world(loaded, folder, replace(SETTINGS, ngram_table=where, **drafting), 0, ranks)

        def replies(world: World) -> list[tuple[list[int], list[TokenLogprobs]]]:
            for prompt in prompts[:3]:
                world.submit(prompt, self.reply_tokens, logprobs=2)
            return [(reply.tokens, reply.logprobs) for reply in world.run().values()]

        def planned(where: Literal["resident", "mmap"]) -> int:
            settings = replace(SETTINGS, ngram_table=where)
            return make_plan(
                table=loaded.bindings(config), groups=loaded.groups(config), config=config, settings=settings,
                world=1, device_kind="cpu", step_width=1, extra=(), available=1 << 40,
            ).tensor_bytes  # fmt: skip

        resident = made("resident")
        expected, held = replies(resident), resident_tensor_bytes(resident.engine.model)
        for depth in range(loaded.spec.draft_depth + 1):
            assert replies(made("mmap", depth)) == expected, f"{depth} drafts"
        assert held - resident_tensor_bytes(made("mmap").engine.model) == planned("resident") - planned("mmap") > 0
        if (ranks := self.worlds[-1]) > 1:
            assert replies(made("mmap", 1, ranks)) == replies(made("resident", 1, ranks))

    def test_template_renders_the_goldens(self) -> None:
        """The family's chat template gives the recorded prompts."""
        if self.template is None or not self.template.is_file():
            pytest.skip(f"no chat template at {self.template}" if self.template else "this model sets no template")
        template, cases = ChatTemplate(self.template.read_text(encoding="utf-8"), {}), self.golden_cases()
        assert cases
        for name, case in cases.items():
            messages = normalise_messages(case["messages"], template)
            rendered = template.render(messages, tools=case.get("tools"), kwargs=case.get("template_kwargs") or {})
            assert rendered == case["prompt"], name
