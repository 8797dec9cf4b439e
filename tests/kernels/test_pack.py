"""Packed weights, taken apart element by element by the published order, against what went in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError, EngineError
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.fp8 import Fp8BlockMatrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.formats.storage import STORAGES

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.ops.kernels.pack import pack_bf16, pack_fp8, pack_nvfp4, row_chunks
from dgpp_core.ops.kernels.pack_bf12 import MOST_OUTSIDE, PackedBf12, pack_bf12
from dgpp_core.ops.kernels.prepare import from_tensors, prepare, shape_of, tensors_of
from dgpp_core.ops.kernels.stored import StoredWeight

CPU = torch.device("cpu")
ROWS, COLUMNS = 48, 384


def places() -> tuple[Tensor, ...]:
    """Row tile, chunk, lane, row half, step j, h and i of every element of the matrix, each ``[ROWS, COLUMNS]``."""
    n, k = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    lane = n % 8 * 4 + k % 64 // 16
    return n // 16, k // 64, lane, n % 16 // 8, k % 16 // 4, k % 4 // 2, k % 2


def unpack_bf16(words: Tensor) -> Tensor:
    tile, chunk, lane, half, j, h, i = places()
    values = words.view(torch.bfloat16).view(ROWS // 16, COLUMNS // 64, 2, 2, 32, 8)
    return values[tile, chunk, half, j // 2, lane, j % 2 * 4 + h * 2 + i]


def unpack_nvfp4(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes 0..15 and scales of every element, by the arithmetic of the kernel on one word at a time."""
    tile, chunk, lane, half, j, h, i = places()
    q = codes[tile, chunk, lane, h * 2 + half].long() & 0xFFFFFFFF
    mask = 0x81C081C0
    turned = torch.stack([(q >> r | q << (32 - r)) & mask for r in (0, 3, 6)] + [(q & 0x001B001B) * 0x1084 & mask])
    field = (turned.gather(0, j.unsqueeze(0))[0] >> 16 * i) & 0xFFFF
    byte = scales[tile, chunk // 2, lane].long() >> 8 * (2 * (chunk % 2) + half) & 0xFF
    scale = torch.where(byte > 0, torch.exp2((byte // 8 - 10).double()) * (1 + byte % 8 / 8), 0.0)
    return field >> 6 & 7 | field >> 15 << 3, scale


def unpack_bf12(packed: PackedBf12) -> Tensor:
    """The stream, then every listed weight in its place."""
    tile, chunk, lane, half, j, h, i = places()
    n = torch.arange(ROWS).unsqueeze(1).expand(-1, COLUMNS)
    byte = packed.signs[tile, chunk, half, lane, j].long() >> 8 * (h + 2 * i) & 0xFF
    jj, jl = j // 2, j % 2
    code = packed.codes[tile, chunk, lane, half * 2 + jj].long() >> (4 * (2 * jl + h) + 16 * i) & 15
    bits = ((byte & 0x80) << 8 | byte & 0x7F) + (code << 7) + (packed.bases[n].long() & 0xFFFF)
    for t in range(ROWS // 16):
        for slot in range(COLUMNS // 128):
            for entry in listed(int(packed.entries[t, slot]), packed.exceptions):
                where = (tile == t) & (chunk // 2 == slot) & (lane == entry >> 2 & 31)
                number = 16 * (chunk % 2) + 8 * half + 4 * jj + 2 * jl + h
                bits[where & (number == entry >> 7 & 31) & (i == entry >> 12 & 1)] = entry >> 16 & 0xFFFF
    return torch.where(bits >= 1 << 15, bits - (1 << 16), bits).to(torch.int16).view(torch.bfloat16)


def listed(entry: int, exceptions: Tensor) -> list[int]:
    """The exceptions behind one entry."""
    if entry == 0:
        return []
    if entry & 3 == 1:
        return [entry]
    assert entry & 3 == 2
    found: list[int] = []
    at = entry >> 2
    while not found or found[-1] & 3 == 3:
        found.append(int(exceptions[at]))
        at += 1
    assert found[-1] & 3 == 1
    return found


def nvfp4(seed: int = 0) -> Nvfp4Matrix:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (ROWS, COLUMNS // 16), generator=generator, dtype=torch.uint8)
    scales[0, :8] = torch.arange(8)
    return Nvfp4Matrix(codes, scales.view(torch.float8_e4m3fn), torch.tensor([0.5, 3.0, 0.125]))


def test_bf16() -> None:
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    assert torch.equal(unpack_bf16(pack_bf16(weight, CPU).words), weight)


def test_nvfp4() -> None:
    matrix = nvfp4()
    packed = pack_nvfp4(matrix, CPU, "w")
    codes, scales = unpack_nvfp4(packed.codes, packed.scales)
    stored = torch.stack([matrix.codes & 15, matrix.codes >> 4], -1).view(ROWS, COLUMNS).long()
    stored_scales = matrix.scales.double().repeat_interleave(16, 1)
    assert torch.equal(scales, stored_scales)
    assert torch.equal(codes, torch.where(stored_scales > 0, stored, 0))
    assert (stored_scales == 0).any()
    assert packed.multipliers.tolist() == [128.0, 768.0, 32.0]


@pytest.mark.parametrize("byte", [0x7F, 0x81, 0xC0, 0xFF])
def test_nvfp4_scales_below_zero_or_nan_are_refused_by_name(byte: int) -> None:
    matrix = nvfp4()
    matrix.scales.view(torch.uint8)[17, 5] = byte
    with pytest.raises(CheckpointError, match="negative or not numbers") as caught:
        pack_nvfp4(matrix, CPU, "layers.3.mlp.down_proj")
    assert caught.value.where == "layers.3.mlp.down_proj"


def test_fp8() -> None:
    codes = torch.randint(0, 127, (ROWS, COLUMNS), dtype=torch.uint8) | torch.randint(0, 2, (ROWS, COLUMNS)).byte() << 7
    matrix = Fp8BlockMatrix(codes.view(torch.float8_e4m3fn), torch.rand(2, 3), (32, 128))
    packed = pack_fp8(matrix, CPU, "w")
    tile, chunk, lane, half, j, h, i = places()
    found = packed.words.view(torch.uint8).view(ROWS // 16, COLUMNS // 64, 2, 32, 16)
    assert torch.equal(found[tile, chunk, half, lane, j * 4 + h * 2 + i], codes)
    assert torch.equal(packed.scales, matrix.scales[[0, 0, 1]])
    codes[3, 3] = 0xFF
    with pytest.raises(CheckpointError, match="not numbers"):
        pack_fp8(matrix, CPU, "w")


@pytest.mark.parametrize("outside", [0, 1, 2, 8])
def test_bf12(outside: int) -> None:
    """Exceptions alone, several in one row tile and slot, at both ends of the exponents, zeros and NaN."""
    weight = (1 + torch.rand(ROWS, COLUMNS)).bfloat16() * torch.where(torch.rand(ROWS, COLUMNS) < 0.5, -1, 1)
    weight *= torch.exp2(torch.randint(-7, 8, (ROWS, COLUMNS)))
    strange = torch.tensor([1e-30, -2e20, 0.0, -0.0, float("inf"), 3e-39, float("nan"), 1e-8]).bfloat16()
    at = torch.tensor([0, 129, 130, 131, 383, 140, 200, 64])
    weight[torch.tensor([0, 0, 0, 15, 8, 3, 16, 40])[:outside], at[:outside]] = strange[:outside]
    packed = pack_bf12(weight, CPU)
    assert packed is not None
    assert torch.equal(unpack_bf12(packed).view(torch.int16), weight.view(torch.int16))
    assert (packed.entries != 0).sum() == {0: 0, 1: 1, 2: 2, 8: 5}[outside]


def test_bf12_of_random_weights_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgpp_core.ops.kernels.pack_bf12._CHUNK", 16 * COLUMNS)
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    weight[weight.abs() < 0.01] = 0.01
    weight[torch.arange(8), 7 * torch.arange(8)] = 1e-9
    packed = pack_bf12(weight, CPU)
    assert packed is not None
    assert torch.equal(unpack_bf12(packed), weight)
    assert len(packed.exceptions) == 9


def test_bf12_is_refused_where_exponents_spread() -> None:
    weight = torch.randn(ROWS, COLUMNS).bfloat16()
    count = int(MOST_OUTSIDE * ROWS * COLUMNS) + 20
    weight.view(-1)[:: ROWS * COLUMNS // count][:count] = 1e-12
    assert pack_bf12(weight, CPU) is None
    assert "bf16.words" in tensors_of(prepare(weight, CPU, bf16_form="bf12"))


def test_small_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, weight = nvfp4(), torch.randn(ROWS, COLUMNS).bfloat16()
    whole = pack_nvfp4(matrix, CPU, "w"), pack_bf16(weight, CPU)
    monkeypatch.setattr(row_chunks, "__defaults__", (16 * COLUMNS,))
    assert len(list(row_chunks(ROWS, COLUMNS))) == 3
    again = pack_nvfp4(matrix, CPU, "w"), pack_bf16(weight, CPU)
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__)


def test_a_prepared_form_is_restored_from_its_tensors() -> None:
    for matrix, form in ((nvfp4(), "nvfp4"), (torch.randn(ROWS, COLUMNS).bfloat16(), "bf16"), (torch.ones(3, 5), "")):
        packed = prepare(matrix, CPU)
        tensors = tensors_of(packed)
        again = from_tensors(tensors)
        assert shape_of(again) == shape_of(packed) == tuple(matrix.shape)
        assert tensors_of(again).keys() == tensors.keys()
        assert all(name.startswith(form or "plain") for name in tensors)
    with pytest.raises(EngineError, match="unknown form"):
        from_tensors({"bf16.words": torch.ones(1), "bf16.more": torch.ones(1)})


@pytest.mark.parametrize("shape", [(40, 128), (48, 96), (7, 5)])
def test_odd_shapes_stay_plain(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).bfloat16()
    packed = prepare(weight, CPU)
    assert isinstance(packed, StoredWeight)
    assert torch.equal(packed.codes, weight)


@pytest.mark.parametrize("storage", STORAGES)
def test_what_no_fragments_fit_stays_as_it_is_stored(storage: str) -> None:
    """Codebooks apart, whose columns are turned: they are widened."""
    shape = (40, 256)
    matrix = decode(storage, encode(storage, torch.randn(shape)), shape)
    packed = prepare(matrix, CPU)
    assert isinstance(packed, StoredWeight)
    assert packed.shape == shape
    held = sum(tensor.nbytes for tensor in packed.tensors().values())
    if storage.startswith("code"):
        assert torch.equal(packed.codes, matrix.dequantise())
    else:
        assert held <= sum(tensor.nbytes for tensor in matrix.tensors().values())
    again = from_tensors(tensors_of(packed))
    assert isinstance(again, StoredWeight)
    assert (again.kind, again.block, again.meta()) == (packed.kind, packed.block, packed.meta())
    assert all(torch.equal(a, b) for a, b in zip(again.operands(), packed.operands(), strict=True))


def test_a_consumed_matrix_becomes_its_resident_form_in_place() -> None:
    matrix, weight = nvfp4(), torch.randn(ROWS, COLUMNS).bfloat16()
    want = pack_nvfp4(matrix, CPU, "w"), pack_bf16(weight, CPU)
    got = pack_nvfp4(matrix, CPU, "w", consume=True), pack_bf16(weight, CPU, consume=True)
    for one, other in zip(want, got, strict=True):
        assert all(torch.equal(getattr(one, f), getattr(other, f)) for f in one.__struct_fields__)
    assert got[0].codes.data_ptr() == matrix.codes.data_ptr()
    assert got[0].scales.data_ptr() == matrix.scales.data_ptr()
    assert got[1].words.data_ptr() == weight.data_ptr()
