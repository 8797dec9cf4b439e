"""Qwen3.8-Flash-Next with its dense matrices in 8 bits: the replies of a checkpoint that has the rounded values."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.formats.codec import decode, encode
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.sampling.params import GREEDY, SamplingParams
from dgpp_core.testing import TensorParallelWorld, World
from dgpp_core.testing.world import Reply

DENSE = EngineSettings(max_concurrency=4, kv_capacity=1024, block_tokens=16, prefill_budget_tokens=16, mtp_depth=2)
ROUNDED = msgspec.structs.replace(DENSE, dense_weights="fp8")


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_plugins(environ={}).model("qwen38-flash-next")


@pytest.fixture(scope="module")
def folders(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and the same with every matrix that is rounded as the values that it is rounded to."""
    plain, rounded = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("rounded")
    raw = dict(model.spec.tiny_config)
    table = model.bindings(model.read_config(raw))
    synthesise(model.spec, table, raw, plain, seed=11)
    for file in plain.iterdir():
        (rounded / file.name).write_bytes(file.read_bytes())
    changed = {b.name for b in table.for_serving(drafting=True, rounded=True).tensors if b.source}
    for file in rounded.glob("*.safetensors"):
        tensors = load_file(file)
        for name in changed & tensors.keys():
            values = tensors[name].float()
            shape = (values.shape[0], values.shape[1])
            tensors[name] = decode("fp8_block", encode("fp8_block", values), shape).dequantise()
        save_file(tensors, file)
    return plain, rounded


def replies(world: World) -> list[Reply]:
    source = torch.Generator().manual_seed(2)
    for number, length in enumerate((40, 3, 29)):
        tokens = torch.randint(3, 500, (length,), generator=source).tolist()
        world.submit(
            tokens, 6, params=SamplingParams(temperature=0.8, seed=number) if number % 2 else GREEDY, logprobs=3
        )
    return list(world.run().values())


def test_replies_are_those_of_the_rounded_values(model: LoadedModel, folders: tuple[Path, Path]) -> None:
    plain, rounded = folders
    found = replies(World.from_checkpoint(model, plain, ROUNDED))
    assert found == replies(World.from_checkpoint(model, rounded, DENSE))
    assert [r.logprobs for r in found] != [r.logprobs for r in replies(World.from_checkpoint(model, plain, DENSE))]


def test_ranks_round_as_one_does(model: LoadedModel, folders: tuple[Path, Path]) -> None:
    plain, rounded = folders
    assert replies(TensorParallelWorld.load(model, plain, ROUNDED, 2)) == replies(
        TensorParallelWorld.load(model, rounded, DENSE, 2)
    )


def test_what_is_rounded_of_the_release(model: LoadedModel) -> None:
    """Half of the bytes of dense matrices; nothing of embedding, routers and the like, and of the images' encoder."""
    full = dict(model.spec.full_config)
    few = {"num_hidden_layers": 4, "layer_types": full["text_config"]["layer_types"][:4], "num_experts": 16}
    table = model.bindings(model.read_config(full | {"text_config": full["text_config"] | few}))
    held = [parameters(t, 1) for t in (table, table.for_serving(drafting=True, rounded=True))]
    changed = {name for name in held[0] if held[0][name].bytes("cuda") != held[1][name].bytes("cuda")}
    kept = {name for name in held[0].keys() - changed if held[0][name].role == "linear"}
    text = {name for name in kept if not name.startswith("vision")}
    assert {name.rpartition(".")[2] for name in text if ".experts." not in name} == {
        "router", "shared_gate", "rates", "embedding", "hidden"
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name in changed} == {"in", "out", "down", "up", "gate_up", "head"}
    before, after = (sum(h[name].bytes("cuda") for name in changed) for h in held)
    assert after == pytest.approx(before / 2, rel=0.002)
