"""The binding-table loader: everything by name, cut as ranks need it, values equal to what was written."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError, Init
from dgpp_core.checkpoint.check import check_bindings
from dgpp_core.checkpoint.headers import TensorEntry, read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth_values import random_tensor

Tensors = dict[str, Tensor]


@pytest.fixture
def tensors(table: BindingTable) -> Tensors:
    source = torch.Generator().manual_seed(5)
    return {b.name: torch.randn(b.shape, generator=source).bfloat16() for b in table.tensors}


def written(folder: Path, tensors: Tensors) -> Mapping[str, TensorEntry]:
    save_file(tensors, folder / "model.safetensors")
    return read_headers(folder)


def weights(
    table: BindingTable,
    entries: Mapping[str, TensorEntry],
    rank: int = 0,
    world: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointWeights:
    return CheckpointWeights(
        table, entries, device=torch.device("cpu"), dtype=torch.float32, rank=rank, world=world, progress=progress
    )


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_ranks_together_hold_exactly_what_was_written(
    tmp_path: Path, table: BindingTable, tensors: Tensors, world: int
) -> None:
    entries = written(tmp_path, tensors)
    ranks = [weights(table, entries, rank, world) for rank in range(world)]
    for i in range(2):
        qk = [w.take(f"layers.{i}.qk") for w in ranks]
        q_rows = 16 // world
        assert torch.equal(torch.cat([part[:q_rows] for part in qk]), tensors[f"layers.{i}.q"].float())
        assert torch.equal(torch.cat([part[q_rows:] for part in qk]), tensors[f"layers.{i}.k"].float())
        assert torch.equal(torch.cat([w.take(f"layers.{i}.o") for w in ranks], 1), tensors[f"layers.{i}.o"].float())
        for w in ranks:
            assert torch.equal(w.take(f"layers.{i}.norm"), tensors[f"layers.{i}.norm"].float())
    for w in ranks:
        assert torch.equal(w.take("embed"), tensors["embed.weight"].float())
        w.finish()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_widened_and_own_their_memory(
    tmp_path: Path, table: BindingTable, tensors: Tensors, stored: torch.dtype
) -> None:
    entries = written(tmp_path, {name: tensor.to(stored) for name, tensor in tensors.items()})
    loader = weights(table, entries)
    taken = loader.take("embed")
    expected = load_file(tmp_path / "model.safetensors")["embed.weight"].clone().float()
    os.truncate(tmp_path / "model.safetensors", 0)
    assert taken.dtype == torch.float32
    assert torch.equal(taken, expected)


@pytest.mark.parametrize("staging", [1, 16, 50, 1 << 24])
@pytest.mark.parametrize("world", [1, 2])
def test_the_size_of_the_pieces_does_not_matter(
    tmp_path: Path, table: BindingTable, tensors: Tensors, monkeypatch: pytest.MonkeyPatch, staging: int, world: int
) -> None:
    monkeypatch.setattr("dgpp_core.checkpoint.reader.STAGING_BYTES", staging)
    loader = weights(table, written(tmp_path, tensors), world - 1, world)
    q, k = tensors["layers.0.q"].float(), tensors["layers.0.k"].float()
    cut = [q.chunk(world)[-1], k.chunk(world)[-1]]
    assert torch.equal(loader.take("layers.0.qk"), torch.cat(cut))
    assert torch.equal(loader.take("layers.0.o"), tensors["layers.0.o"].float().chunk(world, 1)[-1])
    assert torch.equal(loader.take("embed"), tensors["embed.weight"].float())


def test_data_that_is_not_aligned(tmp_path: Path, shard: Callable[..., Path]) -> None:
    values = torch.randn(7, 3)
    header = b'{"a":{"dtype":"F32","shape":[7,3],"data_offsets":[0,84]}}'
    header += b" " * ((-8 - len(header)) % 4 + 1)
    assert (8 + len(header)) % 4 == 1
    entries = read_headers(shard(header, values.numpy().tobytes()))
    assert torch.equal(weights(BindingTable((Binding(name="a", shape=(7, 3), target="a"),)), entries).take("a"), values)


def test_integers_scalars_and_empty_tensors(tmp_path: Path) -> None:
    tensors = {"i": torch.arange(5, dtype=torch.int32), "s": torch.tensor(2.5), "e": torch.zeros(0, 3)}
    table = BindingTable(
        (
            Binding(name="i", shape=(5,), target="i", formats=("I32",)),
            Binding(name="s", shape=(), target="s"),
            Binding(name="e", shape=(0, 3), target="e"),
        )
    )
    loader = weights(table, written(tmp_path, tensors))
    for name, tensor in tensors.items():
        taken = loader.take(name)
        assert taken.dtype == tensor.dtype
        assert torch.equal(taken, tensor)


def test_progress_counts_stored_bytes_up_to_all(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    seen: list[tuple[int, int]] = []
    loader = weights(table, written(tmp_path, tensors), progress=lambda done, total: seen.append((done, total)))
    for target in dict.fromkeys(b.target for b in table.tensors):
        loader.take(target)
    loader.finish()
    total = sum(2 * t.numel() for t in tensors.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len(seen) == 7


def test_each_parameter_is_taken_once_and_all_are_taken(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    loader = weights(table, written(tmp_path, tensors))
    loader.take("embed")
    with pytest.raises(CheckpointError, match="the parameter embed is taken twice"):
        loader.take("embed")
    with pytest.raises(CheckpointError, match="the parameter nonsense is not in the binding table"):
        loader.take("nonsense")
    with pytest.raises(CheckpointError, match=r"never took the parameter layers\.0\.norm") as caught:
        loader.finish()
    assert "6 of 7" in caught.value.found


def refusal(table: BindingTable, entries: Mapping[str, TensorEntry], *words: str, world: int = 1) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_bindings(table, entries, world)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_the_right_checkpoint_passes(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    entries = written(tmp_path, tensors | {"layers.0.rotary.inv_freq": torch.ones(2)})
    check_bindings(table, entries, 8)


def test_what_does_not_match_is_named_with_its_file(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    good = written(tmp_path, tensors)
    file = str(tmp_path / "model.safetensors")
    missing = {name: entry for name, entry in good.items() if name != "layers.1.k"}
    refusal(table, missing, "no tensor layers.1.k", "1 of 9", file)
    unknown = {**good, "layers.2.q": msgspec.structs.replace(good["layers.1.q"], name="layers.2.q")}
    refusal(table, unknown, "does not know: layers.2.q", file)
    turned = {**good, "layers.0.q": msgspec.structs.replace(good["layers.0.q"], shape=(8, 16))}
    refusal(table, turned, "layers.0.q has the wrong shape", "[8, 16]", "[16, 8]", file)
    typed = {**good, "layers.0.q": msgspec.structs.replace(good["layers.0.q"], dtype="I16")}
    refusal(table, typed, "layers.0.q", "dtype that is not accepted", "I16", "F32 or BF16 or F16", file)
    mixed = {**good, "layers.0.q": msgspec.structs.replace(good["layers.0.q"], dtype="F16")}
    refusal(table, mixed, "layers.0.q is F16", "BF16", file)
    refusal(table, good, "layers.0.q", "3 ranks", "16", "a multiple of 3", world=3)


def test_a_table_that_binds_a_tensor_twice_is_refused(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    twice = BindingTable((*table.tensors, msgspec.structs.replace(table.tensors[0], target="other")))
    refusal(twice, written(tmp_path, tensors), "embed.weight is bound twice", "target other")


def test_parts_that_do_not_fit_together(tmp_path: Path) -> None:
    table = BindingTable(
        (Binding(name="a", shape=(2, 3), target="both"), Binding(name="b", shape=(2, 4), target="both")), ()
    )
    loader = weights(table, written(tmp_path, {"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}))
    with pytest.raises(CheckpointError, match="parts of the parameter both do not fit") as caught:
        loader.take("both")
    assert caught.value.where == "a, b"


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    loader = weights(table, written(tmp_path, tensors))
    os.truncate(tmp_path / "model.safetensors", 400)
    with pytest.raises(CheckpointError, match=r"changed since its header was read") as caught:
        loader.take("layers.1.o")
    assert caught.value.where.endswith("model.safetensors, tensor layers.1.o")
    assert caught.value.found.startswith("400 bytes")


@pytest.mark.parametrize("when", ["before it is opened", "while it is read"])
def test_a_file_that_is_written_to_after_its_header_was_read(
    tmp_path: Path, table: BindingTable, tensors: Tensors, when: str
) -> None:
    loader, path = weights(table, written(tmp_path, tensors)), tmp_path / "model.safetensors"
    if when == "while it is read":
        loader.take("layers.0.norm")
    path.write_bytes(path.read_bytes()[:-4] + bytes(4))
    with pytest.raises(CheckpointError, match=r"model\.safetensors changed since its header was read"):
        loader.take("layers.1.o")


def test_a_file_that_is_replaced_by_one_of_its_size_and_time(
    tmp_path: Path, table: BindingTable, tensors: Tensors
) -> None:
    loader, path, other = weights(table, written(tmp_path, tensors)), tmp_path / "model.safetensors", tmp_path / "new"
    other.write_bytes(bytes(path.stat().st_size))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    os.replace(other, path)
    with pytest.raises(CheckpointError, match=r"changed since its header was read") as caught:
        loader.take("layers.1.o")
    assert "inode" in caught.value.expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cut", ["layers.1.q", "layers.0.o", "layers.1.norm"])
def test_a_value_that_is_no_finite_number_names_its_tensor(
    tmp_path: Path, table: BindingTable, tensors: Tensors, value: float, cut: str
) -> None:
    tensors[cut].view(-1)[-1] = value
    target = "layers.1.qk" if cut == "layers.1.q" else cut
    loader = weights(table, written(tmp_path, tensors), rank=1, world=2)
    with pytest.raises(CheckpointError, match=rf"the tensor {cut} has values that are no finite numbers") as caught:
        loader.take(target)
    assert "model.safetensors" in caught.value.where


def test_a_value_that_its_dtype_on_the_device_cannot_hold(tmp_path: Path) -> None:
    table = BindingTable((Binding(name="norm", shape=(2,), target="norm", role="vector"),))
    entries = written(tmp_path, {"norm": torch.tensor([1.0, 3.4e38])})
    assert weights(table, entries).take("norm")[1] == torch.tensor(3.4e38)
    narrow = CheckpointWeights(table, entries, device=torch.device("cpu"), dtype=torch.bfloat16, rank=0, world=1)
    with pytest.raises(CheckpointError, match="the tensor norm has values"):
        narrow.take("norm")


def test_a_file_that_is_gone_after_its_header_was_read(tmp_path: Path, table: BindingTable, tensors: Tensors) -> None:
    loader = weights(table, written(tmp_path, tensors))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot read model\.safetensors"):
        loader.take("layers.1.o")


def test_what_is_accepted_in_one_format_alone_stays_as_it_is_stored(tmp_path: Path) -> None:
    """A table in 8 bits and constants in integers: on the device, in the plan and in a random checkpoint."""
    values = (3, -5, 1 << 40)
    table = BindingTable(
        (
            Binding(name="codes", shape=(6, 4), target="codes", role="embedding", formats=("F8_E4M3",)),
            Binding(
                name="constants", shape=(3,), target="constants", role="vector", formats=("I64",),
                init=Init(values=values),
            ),
        )
    )  # fmt: skip
    made = {b.name: random_tensor(b, 1, b.formats[0]) for b in table.tensors}
    assert made["constants"].tolist() == list(values)
    loaded = weights(table, written(tmp_path, made))
    codes = loaded.take("codes")
    assert codes.dtype == torch.float8_e4m3fn
    assert torch.equal(codes.view(torch.uint8), made["codes"].view(torch.uint8))
    assert loaded.take("constants").tolist() == list(values)
    held = parameters(table, 1)
    assert (held["codes"].bytes("cpu"), held["constants"].bytes("cuda")) == (24, 24)
