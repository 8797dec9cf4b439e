"""The forms in which rows are kept, chosen by what the pool is made of (`dgpp_deepseek.deepseek41.groups`)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor

from dgpp_core.formats.cache_rows import (
    decode_fp4_compressed_rows,
    decode_fp8_window_rows,
    decode_mxfp4_rows,
    encode_fp4_compressed_rows,
    encode_fp8_window_rows,
    encode_mxfp4_rows,
)


class RowForm(msgspec.Struct, frozen=True):
    """A row of values and the row of bytes that is kept of it: codes, then their scales.

    Attributes:
        encode: from float ``[..., W]`` to codes and scales, each ``[..., bytes]`` of one byte an element.
        decode: back, float32.
        codes: bytes of codes of a row of ``W`` values, by W.
        scale: dtype of the scales.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]
    codes: Callable[[int], int]
    code: torch.dtype
    scale: torch.dtype

    def pack(self, x: Tensor, kept: torch.dtype) -> Tensor:
        """Rows as a pool of ``kept`` has them: uint8, or as they are."""
        if kept != torch.uint8:
            return x.to(kept)
        return torch.cat([part.view(torch.uint8) for part in self.encode(x)], dim=-1)

    def unpack(self, rows: Tensor, width: int) -> Tensor:
        """float32 ``[..., width]`` from rows of a pool; bytes of zero are zeros."""
        if rows.dtype != torch.uint8:
            return rows.float()
        count = self.codes(width)
        codes, scales = rows[..., :count].contiguous(), rows[..., count:].contiguous()
        return self.decode(codes.view(self.code), scales.view(self.scale))

    def trip(self, x: Tensor, kept: torch.dtype) -> Tensor:
        """float32: what `unpack` makes of `pack`."""
        return self.unpack(self.pack(x, kept), x.shape[-1])


WINDOW = RowForm(encode_fp8_window_rows, decode_fp8_window_rows, lambda width: width, torch.float8_e4m3fn, torch.uint8)
ENTRY = RowForm(
    encode_fp4_compressed_rows, decode_fp4_compressed_rows, lambda width: width // 2, torch.uint8, torch.float8_e4m3fn
)
KEY = RowForm(encode_mxfp4_rows, decode_mxfp4_rows, lambda width: width // 2, torch.uint8, torch.uint8)
