"""How a paged pool stores the latent row of multi-head latent attention. Torch-free."""

from __future__ import annotations

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.state import Dtype, PagedGroup

KV_DTYPES = ("bf16", "fp8", "fp4")
"""Values of ``engine.kv_dtype``: as computed, e4m3 with a scale a row, or e2m1 with a scale a row and per 16."""

FP4_GROUP = 16


class LatentLayout(msgspec.Struct, frozen=True):
    """Sizes of the parts of a row, in their order there.

    Attributes:
        rank: of the latent.
        turned: width of the key that all heads share.
        codes, blocks, scale, key: bytes of the latent's codes, its block scales, its float32 row scale, and the shared
            key in bfloat16; all 0 where rows are stored as they were computed.
    """

    rank: int
    turned: int
    codes: int = 0
    blocks: int = 0
    scale: int = 0
    key: int = 0

    @property
    def width(self) -> int:
        """Bytes of a row; elements where rows are stored as they were computed."""
        return self.codes + self.blocks + self.scale + self.key or self.rank + self.turned

    @property
    def dtype(self) -> Dtype:
        """Of the pool."""
        return "uint8" if self.codes else "compute"


def latent_layout(kv_dtype: str, rank: int, turned: int) -> LatentLayout:
    """The layout under ``engine.kv_dtype``.

    Raises:
        ConfigError: an unknown name, or fp4 with a latent that is not a whole number of groups.
    """
    match kv_dtype:
        case "bf16":
            return LatentLayout(rank, turned)
        case "fp8" if rank % 4 == 0 and turned % 2 == 0:
            return LatentLayout(rank, turned, rank, 0, 4, 2 * turned)
        case "fp4" if rank % (4 * FP4_GROUP) == 0 and turned % 2 == 0:
            return LatentLayout(rank, turned, rank // 2, rank // FP4_GROUP, 4, 2 * turned)
    raise ConfigError(
        "latent rows cannot be stored so",
        where="engine.kv_dtype",
        found=f"{kv_dtype}, latents of {rank}",
        expected=f"{', '.join(KV_DTYPES)}; fp8 with a multiple of 4, fp4 with one of {4 * FP4_GROUP}",
    )


def latent_group(name: str, layers: int, layout: LatentLayout, ranks: int = 1) -> PagedGroup:
    """The state group of ``layers`` layers; ``ranks`` as in `PagedGroup`."""
    return PagedGroup(name=name, layers=layers, heads=1, width=layout.width, dtype=layout.dtype, ranks=ranks)
