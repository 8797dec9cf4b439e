"""Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) over paged latent rows.

A token's keys and values of all heads are linear in one latent row, which is all that is kept of it. The product that
makes keys of latents is moved to the query (the *absorbed* form), so that rows are attended to as they lie in the
cache. Prefill and decode both take this form: the expanded one, equal by algebra, rounds otherwise, and a row's bits
must not depend on which kind of step it came in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.bus.solo import SoloBus
from dgpp_core.formats.latent_rows import decode_latent_rows, encode_latent_rows, layout_of
from dgpp_core.layers.divided import DividedBlocks
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.ops.head_products import HeadProducts
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.rope import RotaryTable, rotate_pairs


class LatentAttention:
    """Everything between the products of queries and latents and that of the output, for one rank's heads.

    A head of a query is ``nope`` dimensions, which meet the latent, and then ``rope.width``, which are turned and meet
    the one turned key that all heads share. Rotation is of neighbouring pairs.

    Args:
        expand: ``[heads * (nope + value), rank]``: of each head the rows that make a key of a latent, then those that
            make a value.
        latent_norm: ``[rank]``.
        heads: query heads of this rank.
        nope: unturned dimensions of a head.
        scale: applied to the scores.
        eps: of the latent's norm.
        rope: turns queries and the shared key; without it there is no such key.
        blocks: how pools are divided among ranks; by default each has all of them.
    """

    def __init__(
        self,
        expand: Tensor,
        latent_norm: Tensor,
        *,
        heads: int,
        nope: int,
        scale: float,
        eps: float,
        rope: RotaryTable | None = None,
        blocks: DividedBlocks | None = None,
    ) -> None:
        self.heads, self.nope, self.scale, self.eps, self.rope = heads, nope, scale, eps, rope
        self.blocks = blocks or DividedBlocks(SoloBus(), 1)
        self.latent_norm, self.rank = latent_norm, expand.shape[1]
        parts = expand.view(heads, -1, self.rank)
        self._absorb = HeadProducts(parts[:, :nope].transpose(1, 2))
        self._values = HeadProducts(parts[:, nope:])

    def __call__(
        self,
        q: Tensor,
        latent: Tensor,
        index: PagedIndex,
        pool: Tensor,
        dtype: torch.dtype,
        *,
        chosen: Selection | None = None,
        decode: bool = True,
    ) -> Tensor:
        """Attend to each request's rows, or to those that are ``chosen`` of them.

        Args:
            q: float32 ``[R, heads * (nope + rope.width)]``.
            latent: float32 ``[R, rank + rope.width]``, un-normed; the shared key last.
            pool: one layer's pool, ``[blocks, 1, block_tokens, width]`` of a `dgpp_core.formats.latent_layout`; the
                step's rows are written, and then read as they are stored.
            dtype: of the result.
            decode: as in `dgpp_core.ops.linear.Product`.

        Returns:
            ``[R, heads * value]``.
        """
        queries, key = q.view(len(q), self.heads, -1), latent[:, self.rank :].unsqueeze(1)
        near, far = queries[..., : self.nope], queries[..., self.nope :]
        if self.rope is not None:
            cos, sin = self.rope.at(index.batch.positions)
            far, key = rotate_pairs(far, cos, sin), rotate_pairs(key, cos, sin)
        normed = rms_norm(latent[:, : self.rank], self.latent_norm, self.eps, torch.float32).unsqueeze(1)
        layout = layout_of(pool, self.rank, key.shape[-1])
        self.blocks.write(index, pool, encode_latent_rows(layout, normed.to(dtype), key.to(dtype)))
        absorbed = torch.cat((self._absorb(near.to(dtype), decode), far), dim=-1).to(dtype)

        def read(blocks: Tensor) -> tuple[Tensor, Tensor]:
            rows = decode_latent_rows(layout, self.blocks.read(pool, blocks))
            return rows, rows[..., : self.rank]

        mixed = index.attend_read(absorbed, read, self.scale, chosen)
        return self._values(mixed, decode).to(dtype).flatten(1)
