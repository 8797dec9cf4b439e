"""Qwen3.8-Flash-Next with its n-gram table in the checkpoint's files: what happens to them while it serves."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import msgspec
import pytest

from dgpp_core.api import CheckpointError, EngineError
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import LoadedModel, load_plugins
from dgpp_core.testing.world import World

SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp_depth=2, ngram_table="mmap")
PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_plugins(environ={}).model("qwen38-flash-next")


@pytest.fixture
def folder(model: LoadedModel, tmp_path: Path) -> Path:
    raw = dict(model.spec.tiny_config) | {"quantization_config": model.spec.quantised["fp8"]}
    synthesise(model.spec, model.bindings(model.read_config(raw)), raw, tmp_path, seed=5)
    return tmp_path


def table_file(folder: Path) -> Path:
    return next(entry.file for name, entry in read_headers(folder).items() if "ngram_embedding.shard_3" in name)


def test_a_file_that_becomes_short_ends_the_step_by_name(model: LoadedModel, folder: Path) -> None:
    world = World.from_checkpoint(model, folder, SETTINGS)
    assert len(world.reply(PROMPT, 4).tokens) == 4
    os.truncate(table_file(folder), 4096)
    with pytest.raises(CheckpointError) as refused:
        world.reply([*PROMPT, 12], 4)
    assert "ple.table" in refused.value.what
    assert refused.value.found == "the file has become short"


def test_a_file_that_is_written_to_ends_the_step_before_its_tokens_go_out(model: LoadedModel, folder: Path) -> None:
    world, path = World.from_checkpoint(model, folder, SETTINGS), table_file(folder)
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(CheckpointError, match="changed while rows") as refused:
        world.reply(PROMPT, 4)
    assert refused.value.where == str(path)
    assert not world.replies[0].tokens


def test_logits_that_are_no_numbers_have_the_table_among_what_is_to_be_checked(
    model: LoadedModel, folder: Path
) -> None:
    """By a scale that is finite and makes infinities of the rows: what a GPU would make of rows that are none."""
    entry = next(entry for name, entry in read_headers(folder).items() if name.endswith("ngram_embedding.weight_scale"))
    assert entry.dtype == "BF16"
    with entry.file.open("r+b") as file:
        file.seek(entry.start)
        file.write(struct.pack("<f", 3e38)[2:])
    for table, named in (("mmap", True), ("resident", False)):
        settings = msgspec.structs.replace(SETTINGS, ngram_table=table)
        with pytest.raises(EngineError, match="no finite largest value") as refused:
            World.from_checkpoint(model, folder, settings).reply(PROMPT, 4)
        assert ("ple.table" in refused.value.hint) is named


def test_a_checkpoint_that_is_replaced_is_served_on_as_it_was(model: LoadedModel, folder: Path) -> None:
    world, path = World.from_checkpoint(model, folder, SETTINGS), table_file(folder)
    expected = world.reply(PROMPT, 6).tokens
    other = path.with_suffix(".new")
    shutil.copy(path, other)
    with other.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))
    os.replace(other, path)
    path.unlink()
    assert world.reply(PROMPT, 6).tokens == expected
