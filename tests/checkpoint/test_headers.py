"""safetensors headers: what is damaged is refused by file and tensor name before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dgpp_core.api import CheckpointError
from dgpp_core.checkpoint.headers import INDEX, FileState, TensorEntry, read_headers

Write = Callable[..., Path]


def entry(shape: list[int], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def two() -> dict[str, Any]:
    return {"alpha": entry([2, 3], 0, 24), "beta": entry([4], 24, 32, "BF16")}


def refusal(folder: Path, *words: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_headers(folder)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def test_entries_are_those_that_the_safetensors_library_writes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(7)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = read_headers(tmp_path)
    raw = (tmp_path / "model.safetensors").read_bytes()
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == {
        "a": ("F32", (2, 3)),
        "b": ("BF16", (5,)),
        "c": ("I64", ()),
    }
    for name, tensor in tensors.items():
        stored = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw[found[name].start : found[name].end] == stored


def test_bytes_of_an_entry() -> None:
    state = FileState(18, 0, 0)
    entry = TensorEntry(name="a", dtype="F32", shape=(2,), file=Path("x"), start=10, end=18, state=state)
    assert entry.nbytes == 8


@pytest.mark.parametrize(("cut", "victim"), [(1, "beta"), (8, "beta"), (16, "alpha"), (32, "alpha")])
def test_a_short_file_names_the_first_tensor_that_is_cut_off(shard: Write, cut: int, victim: str) -> None:
    refusal(shard(two(), bytes(32)[: 32 - cut]), "model.safetensors", f"the tensor {victim} is cut off")


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_without_room_for_a_header_length(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(size))
    refusal(tmp_path, "model.safetensors", "cut off", f"{size} bytes")


@pytest.mark.parametrize("length", [2**60, 2**63, 2**64 - 1, 100_000_001, 500])
def test_an_absurd_header_length(shard: Write, length: int) -> None:
    refusal(shard(two(), bytes(32), length=length), "model.safetensors", "absurd", str(length))


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": 1', b"[" * 99_999, b'{"alpha": {}, "alpha": {}}'],
)
def test_a_header_that_is_no_json_object(shard: Write, header: bytes) -> None:
    refusal(shard(header, b""), "model.safetensors")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dtype": "F33"}, "unknown dtype"),
        ({"dtype": "bf16"}, "unknown dtype"),
        ({"dtype": 1}, "unknown dtype"),
        ({"dtype": None}, "unknown dtype"),
        ({"dtype": "F64"}, "does not fit"),
        ({"dtype": "BF16"}, "does not fit"),
        ({"shape": [2, 4]}, "does not fit"),
        ({"shape": [2**62, 2**62]}, "does not fit"),
        ({"shape": [-2, -3]}, "malformed shape"),
        ({"shape": [2.0, 3]}, "malformed shape"),
        ({"shape": [True, 6]}, "malformed shape"),
        ({"shape": 6}, "malformed shape"),
        ({"shape": [1] * 17}, "malformed shape"),
        ({"data_offsets": [24, 0]}, "malformed data_offsets"),
        ({"data_offsets": [0]}, "malformed data_offsets"),
        ({"data_offsets": [-1, 23]}, "malformed data_offsets"),
        ({"data_offsets": [0, 24, 48]}, "malformed data_offsets"),
        ({"data_offsets": ["0", "24"]}, "malformed data_offsets"),
        ({"extra": 1}, "malformed entry"),
    ],
)
def test_a_malformed_entry_names_its_tensor(shard: Write, fields: dict[str, Any], words: str) -> None:
    header = two()
    header["alpha"] |= fields
    refusal(shard(header, bytes(32)), "model.safetensors", "the tensor alpha has", words)


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_an_entry_without_a_field(shard: Write, missing: str) -> None:
    header = two()
    del header["beta"][missing]
    refusal(shard(header, bytes(32)), "the tensor beta", "malformed entry")


@pytest.mark.parametrize(
    ("alpha", "beta", "size", "words"),
    [
        ((0, 24), (20, 28), 28, "the tensor beta overlaps the tensor alpha"),
        ((0, 24), (0, 8), 24, "the tensor alpha overlaps the tensor beta"),
        ((0, 24), (28, 36), 36, "the tensor beta leaves a hole after the tensor alpha"),
        ((4, 28), (28, 36), 36, "the tensor alpha leaves a hole after the header"),
        ((0, 24), (24, 32), 33, "longer than its header says"),
        ((0, 24), (24, 32), 10_000, "longer than its header says"),
    ],
)
def test_byte_ranges_must_tile_the_data(
    shard: Write, alpha: tuple[int, int], beta: tuple[int, int], size: int, words: str
) -> None:
    header = {"alpha": entry([2, 3], *alpha), "beta": entry([4], *beta, "BF16")}
    refusal(shard(header, bytes(size)), "model.safetensors", words)


def test_metadata_must_be_strings(shard: Write) -> None:
    assert set(read_headers(shard(two() | {"__metadata__": {"format": "pt"}}, bytes(32)))) == {"alpha", "beta"}
    refusal(shard(two() | {"__metadata__": {"format": 1}}, bytes(32)), "__metadata__", "model.safetensors")


def test_an_empty_tensor_and_a_scalar_are_tensors(shard: Write) -> None:
    found = read_headers(shard({"empty": entry([0, 4], 0, 0), "scalar": entry([], 0, 4)}, bytes(4)))
    assert (found["empty"].nbytes, found["scalar"].nbytes) == (0, 4)


class Sharded:
    """Two shards and their index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_file({"alpha": torch.ones(2), "beta": torch.ones(3)}, folder / "model-00001-of-00002.safetensors")
        save_file({"gamma": torch.ones(4)}, folder / "model-00002-of-00002.safetensors")
        first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        self.map = {"alpha": first, "beta": first, "gamma": second}

    def write(self, index: Any = None) -> Path:
        content = {"metadata": {"total_size": 36}, "weight_map": self.map} if index is None else index
        (self.folder / INDEX).write_text(content if isinstance(content, str) else json.dumps(content))
        return self.folder


@pytest.fixture
def sharded(tmp_path: Path) -> Sharded:
    return Sharded(tmp_path)


def test_shards_with_and_without_an_index(sharded: Sharded) -> None:
    assert set(read_headers(sharded.folder)) == {"alpha", "beta", "gamma"}
    found = read_headers(sharded.write())
    assert {name: e.file.name for name, e in found.items()} == sharded.map


@pytest.mark.parametrize("indexed", [True, False])
def test_a_missing_shard(sharded: Sharded, indexed: bool) -> None:
    if indexed:
        sharded.write()
    (sharded.folder / "model-00002-of-00002.safetensors").unlink()
    words = ("tensor gamma", INDEX) if indexed else ("is missing",)
    refusal(sharded.folder, "model-00002-of-00002.safetensors", *words)


def test_an_index_that_names_a_file_that_is_not_there(sharded: Sharded) -> None:
    sharded.map["beta"] = "model-00003-of-00002.safetensors"
    refusal(sharded.write(), "model-00003-of-00002.safetensors", "tensor beta", INDEX)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", 3, None, ""])
def test_an_index_that_points_elsewhere(sharded: Sharded, name: Any) -> None:
    sharded.map["beta"] = name
    refusal(sharded.write(), "the tensor beta", INDEX)


def test_a_tensor_in_the_index_that_no_file_holds(sharded: Sharded) -> None:
    sharded.map["delta"] = "model-00002-of-00002.safetensors"
    refusal(sharded.write(), "the tensor delta", "model-00002-of-00002.safetensors")


def test_a_tensor_in_a_file_that_the_index_does_not_know(sharded: Sharded) -> None:
    del sharded.map["beta"]
    refusal(sharded.write(), "the tensor beta", INDEX, "model-00001-of-00002.safetensors")


def test_a_shard_of_the_set_that_the_index_never_names(sharded: Sharded) -> None:
    del sharded.map["gamma"]
    refusal(sharded.write(), INDEX, "the shard model-00002-of-00002.safetensors")


@pytest.mark.parametrize("indexed", [True, False])
def test_other_weights_beside_a_set_are_read_and_marked(sharded: Sharded, indexed: bool) -> None:
    """A draft layer may lie in a file that the index does not know; a second copy of the weights does no harm."""
    save_file({"x": torch.ones(1), "alpha": torch.ones(9)}, sharded.folder / "mtp.safetensors")
    found = read_headers(sharded.write() if indexed else sharded.folder)
    assert {name: (e.file.name, e.listed) for name, e in found.items()} == {
        "x": ("mtp.safetensors", False),
        **{name: (file, True) for name, file in sharded.map.items()},
    }
    save_file({"x": torch.ones(1)}, sharded.folder / "other.safetensors")
    refusal(sharded.folder, "the tensor x is in two files", "mtp.safetensors", "other.safetensors")


def test_a_tensor_in_another_file_than_the_index_says(sharded: Sharded) -> None:
    sharded.map["gamma"] = "model-00001-of-00002.safetensors"
    sharded.map["alpha"] = "model-00002-of-00002.safetensors"
    refusal(sharded.write(), "the tensor alpha is not where the index says")


def test_a_tensor_in_two_shards(sharded: Sharded) -> None:
    save_file({"gamma": torch.ones(4), "beta": torch.ones(3)}, sharded.folder / "model-00002-of-00002.safetensors")
    for folder in (sharded.folder, sharded.write()):
        refusal(folder, "the tensor beta", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("index", ["", "{", "[]", "{}", {"weight_map": []}, {"weight_map": {}}, {"weight_map": None}])
def test_a_broken_index_is_not_passed_over(sharded: Sharded, index: Any) -> None:
    refusal(sharded.write(index), INDEX)


def test_a_folder_without_weights_and_one_with_two_sets(sharded: Sharded, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "empty", "no weights", str(tmp_path / "empty"))
    save_file({"alpha": torch.ones(2)}, sharded.folder / "other-00001-of-00001.safetensors")
    refusal(sharded.folder, "several sets of shards", "other-00001-of-00001.safetensors")


def test_a_name_of_weights_that_is_no_file(sharded: Sharded) -> None:
    folder = sharded.write()
    (folder / "more.safetensors").mkdir()
    refusal(folder, "cannot read more.safetensors", "directory", "remove what lies there")
    (folder / "more.safetensors").rmdir()
    (folder / "link.safetensors").symlink_to(folder / "nothing")
    refusal(folder, "cannot read link.safetensors", "No such file")
