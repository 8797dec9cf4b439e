"""Weights on a GPU: the bits that a CPU loads, in planned bytes, and the same again from a resident image."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Binding, BindingTable
from dgpp_core.checkpoint.headers import TensorEntry, read_headers
from dgpp_core.checkpoint.image import ImageCache
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.cli.synth import in_format
from dgpp_core.config.settings import EngineSettings
from dgpp_core.engine.factory import build_engine, prepare
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.resident import WIDENED
from dgpp_core.formats.storage import STORAGES
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.ops.kernels.stored import stored_weight
from dgpp_core.scheduler.sizing import limits_from
from dgpp_core.testing.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
EXPERTS = 8


def table(storage: str, cut: int | None = 0, resident: str = "") -> BindingTable:
    names = [f"experts.{i}.gate.weight" for i in range(EXPERTS)]
    return BindingTable(
        tuple(
            Binding(name=name, shape=(256, 1024), target="gate", cut=cut, storage=storage, resident=resident)
            for name in names
        )
    )


@pytest.fixture(scope="module")
def glm() -> LoadedModel:
    pytest.importorskip("dgpp_glm")
    return load_plugins(environ={}).model("glm47")


def written(glm: LoadedModel, made: BindingTable, folder: Path) -> Mapping[str, TensorEntry]:
    synthesise(glm.spec, made, glm.spec.tiny_config, folder, seed=1)
    return read_headers(folder)


def load(made: BindingTable, entries: Mapping[str, TensorEntry], device: torch.device, world: int) -> CheckpointWeights:
    dtype = torch.float32 if device == CPU else torch.bfloat16
    return CheckpointWeights(made, entries, device=device, dtype=dtype, rank=world - 1, world=world)


def same(here: Tensor, there: Tensor) -> bool:
    return torch.equal(here.contiguous().view(torch.uint8), there.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("storage", [storage for storage in STORAGES if storage != "dense"])
@pytest.mark.parametrize(("cut", "world"), [(None, 1), (0, 2), (1, 2)])
def test_stored_matrices_have_the_bits_of_a_cpu(
    glm: LoadedModel, tmp_path: Path, storage: str, cut: int | None, world: int
) -> None:
    made = table(storage, cut)
    entries = written(glm, made, tmp_path)
    here, there = (load(made, entries, device, world).matrix("gate").tensors() for device in (CPU, CUDA))
    assert here.keys() == there.keys()
    assert all(there[name].is_cuda and same(here[name], there[name]) for name in here)
    if storage in WIDENED:
        there = stored_weight(load(made, entries, CUDA, world).matrix("gate"), CUDA).tensors()
    held = sum(tensor.nbytes for tensor in there.values())
    assert parameters(made, world)["gate"].bytes("cuda") == held


@pytest.mark.parametrize("world", [1, 2])
def test_a_dense_matrix_becomes_its_resident_storage(glm: LoadedModel, tmp_path: Path, world: int) -> None:
    made = table("dense", 0, "nvfp4")
    entries = written(glm, made, tmp_path)
    there = load(made, entries, CUDA, world).matrix("gate")
    whole = load(made, entries, CPU, world).matrix("gate")
    assert whole.dequantise().dtype == torch.float32
    rows = 256 // world
    parts = [decode("nvfp4", encode("nvfp4", part), (rows, 1024)) for part in whole.dequantise().split(rows)]
    want = type(parts[0]).stack(parts).tensors()
    assert all(same(want[name], tensor) for name, tensor in there.tensors().items())
    assert parameters(made, world)["gate"].bytes("cuda") == sum(t.nbytes for t in there.tensors().values())


def test_a_stack_takes_its_own_room_and_a_little_more(glm: LoadedModel, tmp_path: Path) -> None:
    made = table("nvfp4")
    entries = written(glm, made, tmp_path)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    matrix = load(made, entries, CUDA, 1).matrix("gate")
    size = sum(tensor.nbytes for tensor in matrix.tensors().values())
    assert torch.cuda.max_memory_allocated() - before < 1.9 * size  # eight experts: some beside the stack, never all


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_an_engine_from_its_image_replies_as_the_one_that_wrote_it(
    glm: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    settings = EngineSettings(max_concurrency=2, kv_capacity=1024)
    raw, dtype = in_format(glm.spec, glm.spec.tiny_config, form)
    folder = tmp_path / "checkpoint"
    synthesise(glm.spec, glm.bindings(glm.read_config(raw)), raw, folder, seed=3, dtype=dtype)
    assert json.loads((folder / "config.json").read_text()).get("quantization_config") == raw.get("quantization_config")
    prepared = prepare(glm, folder, settings, "cuda")
    replies, stages = [], set[str]()
    for images in (None, ImageCache(tmp_path / "images"), ImageCache(tmp_path / "images")):
        stages.clear()
        engine = build_engine(prepared, CUDA, lambda stage, *_: stages.add(stage), images=images)
        world = World(engine, limits_from(engine.geometry, settings, engine.needs_snapshot))
        reply = world.reply(range(60), 16, logprobs=5)
        replies.append((reply.tokens, reply.logprobs))
    assert stages == {"resident image"}
    assert replies[0] == replies[1] == replies[2]
    (image,) = (tmp_path / "images").glob("*.img")
    data = bytearray(image.read_bytes())
    data[5000] ^= 1
    image.write_bytes(data)
    stages.clear()
    engine = build_engine(prepared, CUDA, lambda stage, *_: stages.add(stage), images=ImageCache(tmp_path / "images"))
    assert "weights" in stages
