"""BF16 matrices in 12 bits a weight, without loss, in fragment order.

The window of exponents and the byte of sign and mantissa are those of bf12 (`dgpp_core.formats.bf12`). There is no
code for a weight outside the window: the window is 16 exponents wide instead of 15, and such weights are listed by row
tile and slot, where the kernel puts them in place of what the stream says.
"""

from __future__ import annotations

import torch
from msgspec import Struct
from torch import Tensor

from dgpp_core.ops.kernels.pack import row_chunks

WINDOW = 16
MOST_OUTSIDE = 1 / 2048
"""Share of weights outside their row's window from which a matrix stays bf16: each costs the warp that meets it."""

_CHUNK = 1 << 22
_LAST, _LINK, _MORE = 1, 2, 3


class PackedBf12(Struct, frozen=True, eq=False):
    """Attributes:
    signs: int32 ``[N/16, K/64, 2, 32, 4]``: row tile, chunk, row half, lane, word j with byte h + 2 i.
    codes: int32 ``[N/16, K/64, 32, 4]``: word (row half, jj) with four bits at 4 (2 jl + h) + 16 i.
    bases: int32 ``[N]``: the lowest exponent of a row's window, in place in both halves of a word.
    entries: int32 ``[N/16, K/128]``, exceptions: int32 list; see `dgpp_core.ops.kernels.dense_bf12`.
    """

    signs: Tensor
    codes: Tensor
    bases: Tensor
    entries: Tensor
    exceptions: Tensor


def pack_bf12(weight: Tensor, device: torch.device) -> PackedBf12 | None:
    """bfloat16 ``[N, K]``, N a multiple of 16 and K of 128; None where too many exponents lie far apart."""
    rows, columns = weight.shape
    tiles, chunks = rows // 16, columns // 64
    packed = PackedBf12(
        torch.empty(tiles, chunks, 2, 32, 4, dtype=torch.int32, device=device),
        torch.empty(tiles, chunks, 32, 4, dtype=torch.int32, device=device),
        torch.empty(rows, dtype=torch.int32, device=device),
        torch.empty(tiles, columns // 128, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    outside, lists, listed = 0, [packed.exceptions], 1
    for part in row_chunks(rows, columns, _CHUNK):
        bits = weight[part].to(device).view(torch.int16).to(torch.int32) & 0xFFFF
        exponents = (bits >> 7) & 0xFF
        bases = lowest_exponents(exponents)
        packed.bases[part] = (bases << 7) * 0x10001
        codes = exponents - bases.unsqueeze(1)
        tile = slice(part.start // 16, part.stop // 16)
        packed.signs[tile] = _signs(bits).view(packed.signs[tile].shape)
        packed.codes[tile] = _codes(codes.clamp(0, WINDOW - 1)).view(packed.codes[tile].shape)
        far = ((codes < 0) | (codes >= WINDOW)).nonzero()
        entries, more = _entries(bits, far, listed)
        packed.entries[tile] = entries
        outside, listed = outside + len(far), listed + len(more)
        lists.append(more)
        if outside > MOST_OUTSIDE * rows * columns:
            return None
    return PackedBf12(packed.signs, packed.codes, packed.bases, packed.entries, torch.cat(lists))


def lowest_exponents(exponents: Tensor) -> Tensor:
    """The start, in 0..240, of each row's 16 consecutive exponents that hold the most weights; the lowest such."""
    counts = torch.zeros(len(exponents), 257, dtype=torch.int32, device=exponents.device)
    counts.scatter_add_(1, exponents.long() + 1, torch.ones_like(exponents))
    below = counts.cumsum(1)
    return (below[:, WINDOW:] - below[:, :-WINDOW]).argmax(1).to(torch.int32)


def _signs(bits: Tensor) -> Tensor:
    """Sign and mantissa bytes as int32 words in fragment order."""
    values = ((bits >> 8) & 0x80 | bits & 0x7F).to(torch.uint8)
    values = values.view(-1, 2, 8, bits.shape[1] // 64, 4, 4, 2, 2)  # tile r g c q j h i
    return values.permute(0, 3, 1, 2, 4, 5, 7, 6).flatten().view(torch.int32)


def _codes(codes: Tensor) -> Tensor:
    """Exponent codes as int32 words in fragment order: byte 2 i + jl, h the high or low half."""
    values = codes.to(torch.uint8).view(-1, 2, 8, codes.shape[1] // 64, 4, 2, 2, 2, 2)  # tile r g c q jj jl h i
    values = values.permute(0, 3, 2, 4, 1, 5, 8, 6, 7)
    return (values[..., 0] | values[..., 1] << 4).flatten().view(torch.int32)


def _entries(bits: Tensor, far: Tensor, listed: int) -> tuple[Tensor, Tensor]:
    """Entries ``[tiles, K/128]`` of some whole row tiles, and what they add to a list of ``listed`` exceptions.

    Args:
        far: ``[E, 2]`` row and column of each weight outside its window.
    """
    slots = bits.shape[1] // 128
    row, k = far[:, 0], far[:, 1]
    place = row // 16 * slots + k // 128
    order = place.argsort(stable=True)
    row, k, place = row[order], k[order], place[order]
    lane = row % 8 * 4 + k % 64 // 16
    # 16 c + 8 r + 4 jj + 2 jl + h: the number of the decoded word
    word = k % 128 // 64 * 16 + row % 16 // 8 * 8 + k % 16 // 2
    fields = bits[row, k].long() << 16 | k % 2 << 12 | word << 7 | lane << 2
    count = torch.bincount(place, minlength=bits.shape[0] // 16 * slots)
    many = (count > 1)[place]
    last = torch.ones_like(many)
    last[:-1] = place[1:] != place[:-1]
    entries = torch.zeros_like(count)
    entries[place[~many]] = fields[~many] | _LAST
    linked, starts = (count > 1).nonzero().flatten(), torch.cumsum(torch.where(count > 1, count, 0), 0)
    entries[linked] = (listed + starts[linked] - count[linked]) << 2 | _LINK
    more = fields[many] | torch.where(last[many], _LAST, _MORE)
    return entries.to(torch.int32).view(-1, slots), more.to(torch.int32)
