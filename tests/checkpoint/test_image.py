"""Resident images: restored bit for bit, and never taken for what they are not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from filelock import FileLock
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError, ModelSpec, Weights
from dgpp_core.checkpoint.headers import read_headers
from dgpp_core.checkpoint.image import Place, build_with_image, image_bytes, image_path
from dgpp_core.checkpoint.image_file import PIECE, PROLOGUE, ImageError, ImageReader
from dgpp_core.checkpoint.image_key import ImageKey, bindings_digest, checkpoint_digest, device_name, software
from dgpp_core.checkpoint.image_weights import LoadableWeights
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.formats.storage import STORAGES

CPU = torch.device("cpu")
TABLE = BindingTable(
    (
        Binding(name="norm", shape=(100,), target="norm", role="vector"),
        Binding(name="scale", shape=(), target="scale", role="vector"),
        Binding(name="qkv.weight", shape=(64, 128), target="qkv", cut=0),
        *(
            Binding(name=f"{storage}.{half}.weight", shape=(64, 256), target=storage, cut=0, storage=storage)
            for storage in STORAGES
            if storage != "dense"
            for half in ("gate", "up")
        ),
        Binding(name="down.weight", shape=(128, 256), target="down", cut=1, storage="nvfp4"),
    )
)
Made = dict[str, Tensor]


class World:
    """A checkpoint, and the image of one of its ranks."""

    def __init__(self, folder: Path, cache: Path, rank: int = 1, world: int = 2) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.entries = read_headers(folder)
        key = ImageKey(
            model="toy", software=software(), checkpoint=checkpoint_digest(self.entries),
            bindings=bindings_digest(TABLE), world=world, rank=rank, device=device_name(CPU), dtype="float32",
        )  # fmt: skip
        size = image_bytes(TABLE, world, CPU)
        self.place = Place(path=image_path(cache, key, folder), key=key, device=CPU, nbytes=size)
        self.loads = self.prepares = 0
        self.seen: list[tuple[int, int]] = []

    def load(self) -> CheckpointWeights:
        self.loads += 1
        return CheckpointWeights(TABLE, self.entries, device=CPU, dtype=torch.float32, rank=self.rank, world=self.world)

    def build(self, weights: LoadableWeights) -> Made:
        """Takes everything; of ``down`` a form of its own."""
        made = {target: weights.take(target) for target in ("norm", "scale")}
        for target in ("qkv", *(storage for storage in STORAGES if storage != "dense")):
            made |= {f"{target}.{name}": tensor for name, tensor in weights.matrix(target).tensors().items()}
        made |= {f"down.{name}": tensor for name, tensor in self.prepared(weights).items()}
        weights.finish()
        return made

    def prepared(self, weights: Weights) -> Mapping[str, Tensor]:
        matrix = weights.matrix("down")
        assert matrix.shape == (128, 256 // self.world)

        def make() -> Mapping[str, Tensor]:
            self.prepares += 1
            return {name: tensor.flip(0).contiguous() for name, tensor in matrix.tensors().items()}

        return weights.prepared("down", "upside down", make)

    def start(self, build: Callable[[LoadableWeights], Made] | None = None) -> Made:
        return build_with_image(
            self.place, self.load, build or self.build, lambda done, total: self.seen.append((done, total))
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec) -> Path:
    folder = tmp_path_factory.mktemp("image") / "checkpoint"
    synthesise(spec, TABLE, spec.tiny_config, folder, seed=1)
    return folder


@pytest.fixture
def world(checkpoint: Path, tmp_path: Path) -> World:
    return World(checkpoint, tmp_path / "cache")


def equal(a: Made, b: Made) -> bool:
    def raw(tensor: Tensor) -> Tensor:
        return tensor.contiguous().flatten().view(torch.uint8)

    return a.keys() == b.keys() and all(
        (a[n].dtype, a[n].shape) == (b[n].dtype, b[n].shape) and torch.equal(raw(a[n]), raw(b[n])) for n in a
    )


def files(world: World) -> set[str]:
    return {path.name for path in world.place.path.parent.iterdir() if path.suffix != ".lock"}


def expect_rebuilt(world: World, want: Made, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """A start that finds the image wanting says so by name, loads the checkpoint and leaves a good image."""
    caplog.clear()
    before = world.loads
    assert equal(world.start(), want)
    assert world.loads == before + 1
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1
    for word in (str(world.place.path), "built anew", *words):
        assert word in said[0], said
    assert equal(world.start(), want)
    assert world.loads == before + 1


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_the_second_start_reads_the_image_alone(checkpoint: Path, tmp_path: Path, rank: int, ranks: int) -> None:
    world = World(checkpoint, tmp_path / "cache", rank, ranks)
    cold = world.start()
    assert (world.loads, world.prepares, world.seen) == (1, 1, [])
    assert files(world) == {world.place.path.name}
    warm = world.start()
    assert (world.loads, world.prepares) == (1, 1)
    assert equal(cold, warm)
    size = sum(tensor.nbytes for tensor in cold.values())
    assert world.seen[-1] == (size, size)
    assert world.place.path.stat().st_size < size + 50_000
    assert equal(cold, build_with_image(world.place, world.load, world.build, lambda done, total: None))


def test_in_inference_mode_as_an_engine_builds(world: World) -> None:
    with torch.inference_mode():
        cold = world.start()
        assert equal(cold, world.start())
    assert world.loads == 1


def test_tensors_of_several_pieces(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dgpp_core.checkpoint.image_file.PIECE", 1000)
    world = World(checkpoint, tmp_path / "cache")
    want = world.start()
    reader = ImageReader(world.place.path, CPU)
    assert max(len(t.digests) for entry in reader.directory.entries for t in entry.tensors) >= 8
    reader.close()
    assert equal(world.start(), want)
    data = bytearray(world.place.path.read_bytes())
    data[PROLOGUE + 30_000] ^= 1
    world.place.path.write_bytes(data)
    expect_rebuilt(world, want, caplog, "is damaged")


def test_every_damaged_byte_around_the_tensors_is_seen(world: World) -> None:
    world.start()
    path = world.place.path
    whole = path.read_bytes()
    end = int.from_bytes(whole[16:24], "little")
    assert end + int.from_bytes(whole[24:32], "little") == len(whole)
    with path.open("r+b", buffering=0) as file:
        for at in (*range(PROLOGUE), *range(end, len(whole))):
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << at % 8]), at)
            with pytest.raises(ImageError):
                ImageReader(path, CPU)
            os.pwrite(file.fileno(), whole[at : at + 1], at)
    ImageReader(path, CPU).close()


def test_every_damaged_tensor_is_seen_and_built_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    want = world.start()
    reader = ImageReader(world.place.path, CPU)
    held = [(entry.target, tensor) for entry in reader.directory.entries for tensor in entry.tensors]
    reader.close()
    assert len(held) > 20
    for number, (target, tensor) in enumerate(held):
        at = tensor.offset + (0, tensor.nbytes - 1, tensor.nbytes // 2)[number % 3]
        data = bytearray(world.place.path.read_bytes())
        data[at] ^= 0x10
        world.place.path.write_bytes(data)
        expect_rebuilt(world, want, caplog, f"parameter {target} is damaged")


@pytest.mark.parametrize("keep", [0, 1, PROLOGUE - 1, PROLOGUE, 0.5, -1])
def test_a_torn_file_is_seen(world: World, caplog: pytest.LogCaptureFixture, keep: float) -> None:
    want = world.start()
    size = world.place.path.stat().st_size
    os.truncate(world.place.path, int(keep * size) if keep == 0.5 else int(keep % size))
    expect_rebuilt(world, want, caplog)
    os.truncate(world.place.path, size + 1)
    expect_rebuilt(world, want, caplog, "torn", str(size + 1))
    world.place.path.write_bytes(b"\0" * size)
    expect_rebuilt(world, want, caplog, "no prologue")


@pytest.mark.parametrize("field", ImageKey.__struct_fields__)
def test_an_image_of_something_else_is_stale(world: World, caplog: pytest.LogCaptureFixture, field: str) -> None:
    want = world.start()
    value = getattr(world.place.key, field)
    other = msgspec.structs.replace(world.place.key, **{field: value + 1 if isinstance(value, int) else f"{value}x"})
    world.place = msgspec.structs.replace(world.place, key=other)
    expect_rebuilt(world, want, caplog, f"of another {field}")


def test_a_checkpoint_is_known_by_what_it_holds(checkpoint: Path, tmp_path: Path, spec: ModelSpec) -> None:
    digest = checkpoint_digest(read_headers(checkpoint))
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    (weights,) = copy.glob("*.safetensors")
    assert checkpoint_digest(read_headers(copy)) == digest
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    assert checkpoint_digest(read_headers(copy)) != digest
    synthesise(spec, TABLE, spec.tiny_config, tmp_path / "other", seed=2)
    (other,) = (tmp_path / "other").glob("*.safetensors")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    entries = read_headers(tmp_path / "other")
    assert {n: (e.dtype, e.shape, e.start) for n, e in entries.items()} == {
        n: (e.dtype, e.shape, e.start) for n, e in read_headers(checkpoint).items()
    }
    assert checkpoint_digest(entries) != digest


def test_each_rank_and_folder_has_its_own_file(checkpoint: Path, tmp_path: Path) -> None:
    places = [World(checkpoint, tmp_path, rank, 2).place.path for rank in (0, 1)]
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    places.append(World(copy, tmp_path, 0, 2).place.path)
    assert len(set(places)) == 3
    assert {path.name.rpartition("-")[0] for path in places} == {"toy-w2r0", "toy-w2r1"}


def changed(world: World, change: Callable[[LoadableWeights], Any]) -> Callable[[LoadableWeights], Made]:
    """The model's build, with something done first."""

    def build(weights: LoadableWeights) -> Made:
        change(weights)
        return world.build(weights)

    return build


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.take("norm"), "norm is not in it, or taken twice"),
        (lambda w: w.take("qkv"), "no form 'tensor' of the parameter qkv"),
        (lambda w: w.matrix("norm"), "is no matrix"),
        (lambda w: w.take("nonsense"), "nonsense is not in it"),
        (lambda w: w.finish(), "does not take: "),
        (lambda w: torch.zeros(1).copy_(w.matrix("down").tensors()["globals"]), "NotImplementedError"),
    ],
)
def test_code_that_asks_for_other_things_gets_the_checkpoint(
    world: World, caplog: pytest.LogCaptureFixture, change: Callable[[LoadableWeights], Any], words: str
) -> None:
    """The first build fails on the image; what the checkpoint says to the second is the model's own affair."""
    world.start()
    with pytest.raises((CheckpointError, RuntimeError)) as caught:
        world.start(changed(world, change))
    assert world.loads == 2
    assert not isinstance(caught.value, ImageError)
    assert words in caplog.text
    assert not world.place.path.exists()
    assert files(world) == set()


def test_a_form_may_be_made_of_several_parameters(world: World) -> None:
    """Neither is then kept as it was stored, and both have shapes only when the image is read."""

    def build(weights: LoadableWeights) -> Made:
        made = {target: weights.take(target) for target in ("norm", "scale")}
        matrices = {t: weights.matrix(t) for t in ("qkv", *(s for s in STORAGES if s != "dense"), "down")}
        for target in matrices.keys() - {"nvfp4", "down"}:
            made |= {f"{target}.{name}": tensor for name, tensor in matrices[target].tensors().items()}
        up, down = (matrices[target].tensors()["codes"] for target in ("nvfp4", "down"))
        made |= weights.prepared(
            ("nvfp4", "down"), "together", lambda: {"codes": torch.cat([up.view(-1), down.view(-1)])}
        )
        weights.finish()
        return made

    cold = world.start(build)
    assert equal(cold, world.start(build))
    assert world.loads == 1
    reader = ImageReader(world.place.path, CPU)
    held = {(e.target, e.form): len(e.tensors) for e in reader.directory.entries if e.target in ("nvfp4", "down")}
    reader.close()
    assert held == {
        ("nvfp4", "stored"): 3,  # it had waited too long
        ("nvfp4", "prepared: together"): 1,
        ("down", "prepared: together"): 0,
    }


def test_a_form_of_another_name_is_made_anew(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()

    def build(weights: LoadableWeights) -> Made:
        made = world.build(weights)
        return made | weights.prepared("down", "sideways", lambda: {"more": torch.arange(3)})

    want = world.start(build)
    assert torch.equal(want["more"], torch.arange(3))
    assert world.loads == 2
    assert "no form 'prepared: sideways' of the parameter down" in caplog.text


def test_a_matrix_that_nothing_was_prepared_of_in_time_is_kept_twice(world: World) -> None:
    """Matrices that wait are written after a few others; a form that is made later still is what a start reads."""

    def build(weights: LoadableWeights) -> Made:
        matrix = weights.matrix("down")
        made = {target: weights.take(target) for target in ("norm", "scale")}
        for target in ("qkv", *(storage for storage in STORAGES if storage != "dense")):
            made |= {f"{target}.{name}": tensor for name, tensor in weights.matrix(target).tensors().items()}
        made |= weights.prepared("down", "late", lambda: {"late": matrix.tensors()["codes"].flip(0)})
        weights.finish()
        return made

    cold = world.start(build)
    reader = ImageReader(world.place.path, CPU)
    assert [entry.form for entry in reader.directory.entries if entry.target == "down"] == ["stored", "prepared: late"]
    reader.close()
    assert equal(cold, world.start(build))
    assert world.loads == 1


def test_a_full_disk_costs_the_image_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    want = World(world.folder, world.place.path.parent / "elsewhere").start()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=(1 << 30) + world.place.nbytes - 1))
    assert equal(world.start(), want)
    assert "the disk has no room" in caplog.text
    assert not world.place.path.exists()


@pytest.mark.parametrize("call", [0, 5, 28])
def test_a_failing_disk_costs_the_image_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: int
) -> None:
    want = World(world.folder, world.place.path.parent / "elsewhere").start()
    calls, plain = iter(range(10_000)), os.pwrite

    def pwrite(file: int, data: memoryview, at: int) -> int:
        if next(calls) >= call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(file, data, at)

    monkeypatch.setattr("os.pwrite", pwrite)
    assert equal(world.start(), want)
    assert "no resident image is written" in caplog.text
    assert "No space left" in caplog.text
    assert files(world) == {"elsewhere"}


def test_a_build_that_fails_leaves_no_image(world: World) -> None:
    with pytest.raises(CheckpointError, match="never took"):
        world.start(changed(world, lambda weights: weights.finish()))
    assert files(world) == set()
    assert equal(world.start(), world.start())
    assert world.loads == 2


def test_what_a_killed_writer_left_is_written_over(world: World) -> None:
    world.place.path.parent.mkdir()
    world.place.path.with_name(f".{world.place.path.name}.tmp").write_bytes(b"x" * 10_000_000)
    assert equal(world.start(), world.start())
    assert (world.loads, files(world)) == (1, {world.place.path.name})


def test_one_process_writes(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world.place.path.parent.mkdir()
    with FileLock(world.place.path.with_suffix(".lock")):
        world.start()
    assert "another process is writing" in caplog.text
    assert not world.place.path.exists()


def test_a_folder_that_cannot_be_made(checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("not a folder")
    world = World(checkpoint, tmp_path / "file")
    world.start()
    assert "no resident image is written" in caplog.text


def test_pieces_are_whole_multiples_of_what_a_disk_likes() -> None:
    assert PIECE % 4096 == PROLOGUE % 4096 == 0


def test_what_has_the_images_name_and_cannot_be_removed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.place.path.mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "dgpp.image"):
        first = world.start()
    assert equal(first, world.start())
    assert world.loads == 2
    assert "cannot be removed" in caplog.text
