"""Ranks that share a Qwen3.8-Flash-Next: what they hold, what they say to each other, and what they see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dgpp_qwen.flash_next.hashing import constants
from dgpp_qwen.vision_canvas import flash_vision
from PIL import Image
from torch import Tensor

from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.images.decode import lay_out
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.inspect import resident_tensor_bytes
from dgpp_core.testing.world import Reply

SETTINGS = EngineSettings(
    max_concurrency=4, kv_capacity=1024, block_tokens=16, prefill_budget_tokens=16, mtp=True, mtp_depth=4
)
LENGTHS = (40, 3, 29)
PAD = 300


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_plugins(environ={}).model("qwen38-flash-next")


@pytest.fixture(scope="module")
def folder(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random weights in a format: ``folder("fp8")``."""
    made: dict[str, Path] = {}

    def make(fmt: str) -> Path:
        if fmt not in made:
            made[fmt] = tmp_path_factory.mktemp(fmt)
            raw = dict(model.spec.tiny_config) | {"quantization_config": model.spec.quantised.get(fmt)}
            synthesise(model.spec, model.bindings(model.read_config(raw)), raw, made[fmt], seed=11)
        return made[fmt]

    return make


def replies(world: World) -> list[Reply]:
    """Greedy and seeded ones, drafted and together, with what they were likely."""
    source = torch.Generator().manual_seed(2)
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(290, (length,), generator=source).tolist()
        params = SamplingParams(temperature=0.8, seed=number) if number % 2 else GREEDY
        world.submit(tokens, 6, params=params, logprobs=5)
    found = world.run()
    return [found[number] for number in range(len(LENGTHS))]


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_a_gpus_plan_counts_what_is_loaded(model: LoadedModel, folder: Callable[[str], Path], fmt: str) -> None:
    """Parameter by parameter, on every rank."""
    raw = json.loads((folder(fmt) / "config.json").read_text())
    table, entries = model.bindings(model.read_config(raw)), read_headers(folder(fmt))
    for world in (1, 2, 4):
        planned = {name: one.bytes("cuda") for name, one in parameters(table, world).items()}
        for rank in range(world):
            weights = CheckpointWeights(
                table, entries, device=torch.device("cpu"), dtype=torch.bfloat16, rank=rank, world=world
            )
            held = {
                name: sum(tensor.nbytes for tensor in weights.matrix(name).tensors().values())
                if one.role == "linear"
                else weights.take(name).nbytes
                for name, one in parameters(table, world).items()
            }
            assert held == planned


def test_an_embedding_that_ranks_divide_changes_no_bit_of_a_reply(
    model: LoadedModel, folder: Callable[[str], Path]
) -> None:
    divided = msgspec.structs.replace(SETTINGS, embed_sharding="vocab")
    whole, world = (TensorParallelWorld.load(model, folder("bf16"), s, 2) for s in (SETTINGS, divided))
    assert replies(world) == replies(whole)
    held = [resident_tensor_bytes(w.engine.model, w.engine.drafter) for w in (whole, world)]
    assert held[0] - held[1] == 4 * 512 * 64 // 2


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@torch.inference_mode()
def test_every_row_of_the_table_is_found_on_the_rank_that_has_it(
    model: LoadedModel, folder: Callable[[str], Path], fmt: str
) -> None:
    """To the bit: of a row one rank's part alone is not zero."""
    config: Any = model.read_config(model.spec.tiny_config)
    rows = torch.arange(constants(config).rows).view(-1, config.ngram_heads)
    one: Any = World.from_checkpoint(model, folder(fmt), SETTINGS).engine.model
    wanted: Tensor = one.ngrams.table.look_up(rows)
    for count in (2, 4):
        world = TensorParallelWorld.load(model, folder(fmt), SETTINGS, count)
        tables: list[Any] = [rank.engine.model for rank in world.ranks]
        found = world.loopback.run(lambda bus, held=tables: held[bus.rank].ngrams.table.look_up(rows))  # type: ignore[misc]
        assert all(torch.equal(each, wanted) for each in found)


def seen(world: World, seed: int) -> list[int]:
    """The reply to a text around an image."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = lay_out(Image.fromarray(small).resize((128, 128)), flash_vision({"size": {"shortest_edge": 1}}, PAD), 64)
    name = world.submit([5, 6, 7, *[PAD] * image.tokens, 8, 9], 4, pictures=(msgspec.structs.replace(image, start=3),))
    return world.run()[name].tokens


def test_ranks_take_what_the_first_one_saw(model: LoadedModel, folder: Callable[[str], Path]) -> None:
    """Two ranks reply as one does, and go on together where the second one's encoder is a bit off."""
    ranks = TensorParallelWorld.load(model, folder("bf16"), SETTINGS, 2)
    alone = World.from_checkpoint(model, folder("bf16"), SETTINGS)
    assert seen(ranks, 1) == seen(alone, 1)
    second: Any = ranks.ranks[1].engine.model
    encoder = second.encoder
    second.encoder = lambda *given: encoder(*given) * 1.5
    assert seen(ranks, 2) == seen(alone, 2) != seen(alone, 1)
