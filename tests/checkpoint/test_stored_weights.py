"""Matrices in stored form: bound by all their tensors, cut for ranks, stacked without a second copy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError, PluginError
from dgpp_core.checkpoint.check import check_bindings, parts_of
from dgpp_core.checkpoint.headers import TensorEntry, read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.stacking import stack
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.storage import STORAGES

CPU = torch.device("cpu")
QUANTISED = [storage for storage in STORAGES if storage != "dense"]
N, K, EXPERTS = 256, 512, 3


def table(storage: str, cut: int | None = 0, experts: int = EXPERTS, shape: tuple[int, int] = (N, K)) -> BindingTable:
    names = [f"experts.{i}.gate.weight" for i in range(experts)]
    return BindingTable(
        tuple(Binding(name=n, shape=shape, target="gate", cut=cut, storage=storage) for n in names),
        ignored=("*.k_scale",),
    )


def written(folder: Path, made: BindingTable) -> Mapping[str, TensorEntry]:
    source, tensors = torch.Generator().manual_seed(1), {}
    for scale, binding in enumerate(made.tensors, 1):
        weight = torch.randn(binding.shape, generator=source) * 0.03 * scale
        encoded = encode(binding.storage, weight)
        tensors |= {part.name: encoded[part.suffix] for part in parts_of(binding) if part.suffix in encoded}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return read_headers(folder)


def load(made: BindingTable, entries: Mapping[str, TensorEntry], rank: int = 0, world: int = 1) -> CheckpointWeights:
    return CheckpointWeights(made, entries, device=CPU, dtype=torch.float32, rank=rank, world=world)


def whole(made: BindingTable, entries: Mapping[str, TensorEntry]) -> Tensor:
    """The matrices read with the safetensors library, dequantised and stacked."""
    from safetensors.torch import load_file

    stored = load_file(next(iter(entries.values())).file)
    found = []
    for binding in made.tensors:
        held = {part.suffix: stored[part.name] for part in parts_of(binding) if part.name in stored}
        found.append(decode(binding.storage, held, (binding.shape[0], binding.shape[1])).dequantise())
    return torch.stack(found)


@pytest.mark.parametrize("storage", QUANTISED)
@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_together_hold_what_was_written(tmp_path: Path, storage: str, cut: int, world: int) -> None:
    made = table(storage, cut)
    entries = written(tmp_path, made)
    want = whole(made, entries)
    got = []
    for rank in range(world):
        weights = load(made, entries, rank, world)
        matrix = weights.matrix("gate")
        weights.finish()
        assert matrix.shape == (EXPERTS * N // (world if cut == 0 else 1), K // (world if cut == 1 else 1))
        got.append(matrix.dequantise().view(EXPERTS, -1, matrix.shape[1]))
    assert torch.equal(torch.cat(got, dim=1 + cut), want)


@pytest.mark.parametrize("storage", ["nvfp4", "fp8_channel", "int4_g64", "code3_g128"])
def test_a_rank_reads_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    made = table(storage)
    entries = written(tmp_path, made)
    read: list[int] = []
    plain = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: (read.append(other.nbytes), plain(self, other))[1])
    monkeypatch.setattr("dgpp_core.checkpoint.loader.stack", lambda parts, count: list(parts).pop())
    load(made, entries, 1, 4).matrix("gate")
    stored = sum(entry.nbytes for entry in entries.values())
    assert stored / 4 - 100 <= sum(read) <= stored / 4 + 100


@pytest.mark.parametrize("storage", STORAGES)
def test_the_stack_is_that_of_the_format(storage: str) -> None:
    source = torch.Generator().manual_seed(2)
    parts: list[Matrix] = []
    for i in range(4):
        weight = torch.randn(N, K, generator=source) * 2.0**i * 0.37
        parts.append(decode(storage, encode(storage, weight), (N, K)))
    mine, theirs = stack(iter(parts), 4), type(parts[0]).stack(parts)
    assert mine.shape == theirs.shape == (4 * N, K)
    assert mine.tensors().keys() == theirs.tensors().keys()
    for name, tensor in mine.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), theirs.tensors()[name].contiguous().view(torch.uint8))


@pytest.mark.parametrize("storage", ["nvfp4", "fp8_block", "dense"])
def test_parts_of_different_heights_are_stacked_by_the_format(storage: str) -> None:
    source = torch.Generator().manual_seed(3)
    weights = [torch.randn(rows, K, generator=source) for rows in (128, 128, 384)]
    parts = [decode(storage, encode(storage, w), (w.shape[0], K)) for w in weights]
    got = stack(iter(parts), 3)
    assert torch.equal(got.dequantise(), torch.cat([part.dequantise() for part in parts]))


@pytest.mark.parametrize("storage", QUANTISED)
def test_parts_that_are_less_high_than_a_scale_block_keep_their_values(storage: str) -> None:
    source = torch.Generator().manual_seed(5)
    weights = [torch.randn(64, 256, generator=source) * 4**i for i in range(4)]
    parts = [decode(storage, encode(storage, weight), (64, 256)) for weight in weights]
    got = stack(iter(parts), 4)
    assert torch.equal(got.dequantise(), torch.cat([part.dequantise() for part in parts]))


@pytest.mark.parametrize(
    ("storage", "suffix", "byte"),
    [
        ("nvfp4", "weight_scale", 0x7F), ("nvfp4_ct", "weight_scale", 0xFF), ("fp8_block", "weight", 0xFF),
        ("fp8_channel", "weight", 0x7F), ("mxfp4", "scale", 0xFF),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", [1, 2])
def test_a_code_or_scale_that_is_no_number_names_its_tensor(
    tmp_path: Path, storage: str, suffix: str, byte: int, world: int
) -> None:
    made = table(storage)
    entries = written(tmp_path, made)
    victim = entries[f"experts.1.gate.{suffix}"]
    with victim.file.open("r+b") as file:
        file.seek(victim.end - 1)
        file.write(bytes([byte]))
    entries = read_headers(tmp_path)
    with pytest.raises(CheckpointError, match=f"the tensor {victim.name} has values that are no finite numbers"):
        load(made, entries, world - 1, world).matrix("gate")


@pytest.mark.parametrize(("storage", "suffix"), [("nvfp4", "weight_scale_2"), ("fp8_block", "weight_scale_inv")])
def test_a_wide_scale_that_is_no_number_names_its_tensor(tmp_path: Path, storage: str, suffix: str) -> None:
    made = table(storage)
    entries = written(tmp_path, made)
    victim = entries[f"experts.1.gate.{suffix}"]
    with victim.file.open("r+b") as file:
        file.seek(victim.start)
        file.write(b"\x00\x00\xc0\x7f")
    entries = read_headers(tmp_path)
    with pytest.raises(CheckpointError, match=f"the tensor {victim.name} has values that are no finite numbers"):
        load(made, entries).matrix("gate")


def test_a_layers_experts_take_their_own_room_and_one_experts_more(tmp_path: Path) -> None:
    """Peak of the tensors alive while 32 experts are stacked, counted by torch's own allocation profiler."""
    made = table("nvfp4", experts=32)
    weights = load(made, written(tmp_path, made))
    with torch.profiler.profile(profile_memory=True) as profile:
        matrix = weights.matrix("gate")
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    size = sum(tensor.nbytes for tensor in matrix.tensors().values())
    staging = 1 << 24
    assert size <= peak - staging < 1.2 * size, (size, peak)


def refusal(made: BindingTable, entries: Mapping[str, TensorEntry], *words: str) -> None:
    with pytest.raises((CheckpointError, PluginError)) as caught:
        check_bindings(made, entries)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_every_tensor_of_a_matrix_is_checked_by_its_own_name(tmp_path: Path) -> None:
    made = table("nvfp4")
    good = dict(written(tmp_path, made))
    check_bindings(made, good)
    for name in good:
        refusal(made, {k: e for k, e in good.items() if k != name}, f"no tensor {name}", "1 of 9 expected")
        refusal(
            made, good | {name: msgspec.structs.replace(good[name], dtype="I16")}, name, "dtype that is not accepted"
        )
        refusal(made, good | {name: msgspec.structs.replace(good[name], shape=(3, 3))}, name, "wrong shape", "[3, 3]")
    scale = "experts.0.gate.weight_scale"
    unknown = msgspec.structs.replace(good[scale], name="experts.0.gate.weight_scale_inv")
    refusal(made, good | {unknown.name: unknown}, f"does not know: {unknown.name}")
    scalar = msgspec.structs.replace(good["experts.0.gate.weight_scale_2"], name="experts.0.gate.input_scale")
    check_bindings(made, good | {scalar.name: scalar})


def test_bindings_that_no_storage_can_hold(tmp_path: Path) -> None:
    made = table("nvfp4")
    good = written(tmp_path, made)
    first, *rest = made.tensors
    change = msgspec.structs.replace
    refusal(BindingTable((change(first, storage="nvfp5"), *rest)), good, "nvfp5", "nvfp4")
    refusal(BindingTable((first, *rest, change(first, target="other"))), good, "is bound twice", "target other")
    refusal(BindingTable((change(first, storage="mxfp4"), *rest)), good, "different ways", "mxfp4 and nvfp4")
    refusal(BindingTable(tuple(change(b, resident="fp9") for b in made.tensors)), good, "fp9")


def test_a_matrix_is_no_single_tensor(tmp_path: Path) -> None:
    made = table("fp8_block")
    with pytest.raises(CheckpointError, match="the parameter gate is no single tensor") as caught:
        load(made, written(tmp_path, made)).take("gate")
    assert "weights.matrix" in caught.value.hint


def test_a_dense_matrix_is_widened_as_take_widens_it(tmp_path: Path) -> None:
    made = BindingTable(
        tuple(Binding(name=n, shape=(4, 6), target="ab", cut=0, resident="nvfp4") for n in ("a.weight", "b.weight"))
    )
    made = msgspec.structs.replace(made, tensors=tuple(msgspec.structs.replace(b, shape=(4, 16)) for b in made.tensors))
    save_file({b.name: torch.randn(b.shape).bfloat16() for b in made.tensors}, tmp_path / "model.safetensors")
    entries = read_headers(tmp_path)
    matrix = load(made, entries, 1, 2).matrix("ab")
    assert matrix.tensors()["weight"].dtype == torch.float32
    assert torch.equal(matrix.dequantise(), load(made, entries, 1, 2).take("ab"))


def test_what_is_accepted_as_f32_alone_is_never_narrowed(tmp_path: Path) -> None:
    made = BindingTable(
        (
            Binding(name="bias", shape=(5,), target="bias", role="vector", formats=("F32",)),
            Binding(name="norm", shape=(5,), target="norm", role="vector"),
        )
    )
    values = torch.randn(5)
    save_file({"bias": values, "norm": values.clone()}, tmp_path / "model.safetensors")
    weights = CheckpointWeights(made, read_headers(tmp_path), device=CPU, dtype=torch.bfloat16, rank=0, world=1)
    assert torch.equal(weights.take("bias"), values)
    assert torch.equal(weights.take("norm"), values.bfloat16())


def test_a_file_beside_the_checkpoint_belongs_to_it_once_a_tensor_of_it_is_bound(tmp_path: Path) -> None:
    made = table("nvfp4", experts=1)
    written(tmp_path, made)
    save_file({"draft.weight": torch.ones(2), "more": torch.ones(1)}, tmp_path / "mtp.safetensors")
    entries = read_headers(tmp_path)
    check_bindings(made, entries)
    draft = Binding(name="draft.weight", shape=(2,), target="draft", role="vector")
    refusal(BindingTable((*made.tensors, draft)), entries, "does not know: more", "mtp.safetensors")
    check_bindings(BindingTable((*made.tensors, draft), ignored=("more",)), entries)


def test_prepared_calls_make(tmp_path: Path) -> None:
    made = table("nvfp4")
    weights = load(made, written(tmp_path, made))
    matrix = weights.matrix("gate")
    assert weights.prepared("gate", "as it is", matrix.tensors) == matrix.tensors()
