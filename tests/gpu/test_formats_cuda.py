"""Every stored format has the same bits on a GPU as on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgpp_core.formats import bf12, cache_rows, codec
from dgpp_core.formats.storage import STORAGES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS = {
    "fp8": cache_rows.encode_fp8_rows, "fp4": cache_rows.encode_fp4_rows, "window": cache_rows.encode_fp8_window_rows,
    "compressed": cache_rows.encode_fp4_compressed_rows, "mxfp4": cache_rows.encode_mxfp4_rows,
}  # fmt: skip


def _weight(rows: int = 384, columns: int = 2048) -> Tensor:
    source = torch.Generator().manual_seed(7)
    return torch.randn(rows, columns, generator=source) * torch.exp2(4 * torch.randn(rows, 1, generator=source))


def _same(here: Tensor, there: Tensor) -> bool:
    return torch.equal(here.contiguous().view(torch.uint8), there.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("storage", STORAGES)
def test_codes_values_cuts_and_stacks(storage: str) -> None:
    weight = _weight()
    here, there = codec.encode(storage, weight), codec.encode(storage, weight.cuda())
    for suffix, tensor in here.items():
        assert _same(tensor.reshape(-1), there[suffix].reshape(-1)), suffix
    shape = (weight.shape[0], weight.shape[1])
    on_cpu, on_gpu = codec.decode(storage, here, shape), codec.decode(storage, there, shape)
    assert _same(on_cpu.dequantise(), on_gpu.dequantise())
    cut = on_gpu.rows(64, 192).columns(256, 640)
    assert _same(on_cpu.dequantise()[64:256, 256:896], cut.dequantise())
    stack = type(cut).stack([cut, cut])
    assert _same(torch.cat([cut.dequantise(), cut.dequantise()]).cpu(), stack.dequantise())


@pytest.mark.parametrize("name", ROWS)
def test_cache_rows(name: str) -> None:
    x = _weight().to(torch.bfloat16)
    x[3] = 0
    for here, there in zip(ROWS[name](x), ROWS[name](x.cuda()), strict=True):
        assert _same(here, there)


def test_bf12() -> None:
    weight = _weight().to(torch.bfloat16)
    weight[9] = torch.exp2(torch.linspace(-60, 60, 2048)).to(torch.bfloat16)
    here, there = bf12.encode(weight), bf12.encode(weight.cuda())
    assert here is not None
    assert there is not None
    for field, tensor in here.tensors().items():
        assert _same(tensor, there.tensors()[field]), field
    assert _same(weight, there.weight())
