"""Experts of a layer on a GPU: resident tensors, and the launches of decode and prefill rows.

NVFP4 weights whose shape fits are kept in fragment order and read by the decode and the grouped kernels; everything
else stays as it is stored (`experts_generic`). Which of the two is decided by format and shape alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import torch
import triton
from torch import Tensor

from dgpp_core.api.errors import EngineError
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.ops.kernels import experts_generic, experts_prefill
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.ops.kernels.experts_decode import decode_down, decode_gate_up
from dgpp_core.ops.kernels.experts_order import order_picks
from dgpp_core.ops.kernels.pack import pack_nvfp4
from dgpp_core.ops.kernels.stored import StoredWeight, stored_weight
from dgpp_core.ops.router import Routing

DECODE_ROWS = 64
"""Rows of one decode launch; more take several."""
GATE_UP_WARPS, DOWN_WARPS = 4, 1
_AHEAD = 3
"""Slots of 128 k in flight."""
_DOWN_TILES = 2
_REGISTERS = 128
"""Cap of a thread's registers: without it both decode kernels lose 8 to 10 % to lower occupancy."""
GENERIC_DECODE_TILE, GENERIC_PREFILL_TILE = 16, 64
Part = Literal["gate_up", "down"]
PARTS: tuple[Part, Part] = ("gate_up", "down")


def fits_fragments(gate_up: Matrix, down: Matrix, entries: int) -> bool:
    """Whether the fragment kernels take these weights."""
    if not (isinstance(gate_up, Nvfp4Matrix) and isinstance(down, Nvfp4Matrix)):
        return False
    hidden, inner = gate_up.shape[1], down.shape[1]
    scales_fit = gate_up.segment % 16 == 0 and down.segment % 16 == 0
    return hidden % 512 == 0 and inner % 128 == 0 and down.shape[0] == entries * hidden and scales_fit


class CudaExperts:
    """Gated feed-forwards ``f_e(x) = down_e (silu(gate_e x) * up_e x)``, stacked; same contract as `ops.experts`.

    Args:
        gate_up: ``[entries * 2 I, H]``; an entry's rows are gate and then up, the shared expert is the last entry.
        down: ``[entries * H, I]``.
        experts: routed experts; the entries are these and the shared one.
        shared: whether there is a shared expert.
        limit: of gate and up, as `dgpp_core.ops.activation.swiglu` has it.
        device: where they are kept; the matrices may be elsewhere.
    """

    def __init__(
        self,
        gate_up: Matrix,
        down: Matrix,
        *,
        experts: int,
        shared: bool = True,
        limit: float | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        entries, where = experts + shared, torch.device(device)
        up, out = (prepare_part(part, gate_up, down, entries, where) for part in PARTS)
        self._take(up | out, experts, shared, limit)

    @classmethod
    def from_prepared(
        cls, tensors: Mapping[str, Tensor], *, experts: int, shared: bool = True, limit: float | None = None
    ) -> Self:
        """The experts whose `prepared` gave ``tensors``."""
        made = cls.__new__(cls)
        made._take(tensors, experts, shared, limit)
        return made

    def prepared(self) -> dict[str, Tensor]:
        """The resident tensors by name."""
        return dict(self._tensors)

    def _take(self, tensors: Mapping[str, Tensor], experts: int, shared: bool, limit: float | None) -> None:
        self._tensors, self.experts, self.shared, self.limit = dict(tensors), experts, shared, limit
        self.packed, entries = "down_codes" in tensors, experts + shared
        if self.packed:
            down = tensors["down_codes"]
            self.hidden, self.inner = down.shape[0] * 16 // entries, down.shape[1] * 64
        else:
            self._stored = {part: StoredWeight.from_tensors(_of_part(part, tensors)) for part in PARTS}
            rows, self.inner = self._stored["down"].shape
            self.hidden = rows // entries

    def _weights(self, which: str) -> tuple[Tensor, ...]:
        return tuple(self._tensors[f"{which}_{name}"] for name in ("codes", "scales", "multipliers"))

    def __call__(self, x: Tensor, routing: Routing, decode: bool = True, launch_pdl: bool = True) -> Tensor:
        """What each expert gives for each of its rows, unweighted.

        Args:
            x: bfloat16 ``[M, H]``.
            decode: decode and verify rows, or prefill rows.
            launch_pdl: let a decode kernel start while the one before it ends.

        Returns:
            float32 ``[M * k + M, H]``: row ``m * k + j`` is of expert ``routing.ids[m, j]``, row ``M * k + m`` of the
            shared expert; without one ``[M * k, H]``.

        Raises:
            EngineError: activations that are not bfloat16, or too many rows.
        """
        if x.dtype != torch.bfloat16:
            raise EngineError(
                "expert kernels take bfloat16 activations", where="experts", found=str(x.dtype), expected="bfloat16"
            )
        x, ids = x.contiguous(), routing.ids.contiguous()
        total = ids.numel() + x.shape[0] * self.shared
        h = torch.empty(total, self.inner, dtype=torch.bfloat16, device=x.device)
        y = torch.empty(total, self.hidden, dtype=torch.float32, device=x.device)
        if total == 0:
            return y
        if not self.packed:
            self._generic(x, ids, h, y, GENERIC_DECODE_TILE if decode else GENERIC_PREFILL_TILE)
        elif decode:
            for first in range(0, x.shape[0], DECODE_ROWS):
                self._decode(x, ids, h, y, first, launch_pdl)
        else:
            self._prefill(x, ids, h, y)
        return y

    def _decode(self, x: Tensor, ids: Tensor, h: Tensor, y: Tensor, first: int, pdl: bool) -> None:
        """Rows ``first .. first + 64``; the shared expert's results are ``shared_row`` rows behind their first pick."""
        top_k = ids.shape[1]
        part, picks = x[first : first + DECODE_ROWS], ids[first : first + DECODE_ROWS]
        h, y = h[first * top_k :], y[first * top_k :]
        rows, shared_row = part.shape[0], ids.numel() - first * top_k + first
        options = _decode_options(top_k, self.experts, self.shared, rows, pdl)
        programs = rows * top_k + self.shared
        decode_gate_up[(self.inner // 16, programs)](
            *self._weights("gate_up"),
            part.view(torch.int32),
            h,
            picks,
            rows,
            shared_row,
            **_gate_up_options(self.hidden, self.inner, self.limit),
            **options,
            FETCH=pdl,
        )
        decode_down[(self.hidden // (16 * _DOWN_TILES), programs)](
            *self._weights("down"),
            h.view(torch.int32),
            y,
            picks,
            rows,
            shared_row,
            **_down_options(self.hidden, self.inner),
            **options,
        )

    def _prefill(self, x: Tensor, ids: Tensor, h: Tensor, y: Tensor) -> None:
        wgmma = torch.cuda.get_device_capability(x.device)[0] == 9
        picks, top_k = ids.numel(), ids.shape[1]
        tile = experts_prefill.tile_size(picks, self.experts, wgmma)
        tables = order_picks(ids, self.experts, self.shared, tile)
        source = experts_prefill.in_fragment_order(x)
        up, down = (2 * self.inner, self.hidden), (self.hidden, self.inner)
        gated = (tables, picks, top_k, True, tile, wgmma, self.limit)
        experts_prefill.run(self._weights("gate_up"), up, source, h, *gated)
        experts_prefill.run(self._weights("down"), down, h, y, tables, picks, top_k, False, tile, wgmma)

    def _generic(self, x: Tensor, ids: Tensor, h: Tensor, y: Tensor, tile: int) -> None:
        tables, picks, top_k = order_picks(ids, self.experts, self.shared, tile), ids.numel(), ids.shape[1]
        (up, down), entries = (self._stored[part] for part in PARTS), self.experts + self.shared
        experts_generic.run(up, entries, x, h, tables, picks, top_k, True, tile, self.limit)
        experts_generic.run(down, entries, h, y, tables, picks, top_k, False, tile)


def prepare_part(
    part: Part,
    gate_up: Matrix,
    down: Matrix,
    entries: int,
    device: torch.device,
    name: str = "experts",
    consume: bool = False,
) -> dict[str, Tensor]:
    """The resident tensors of one of the two stacks; their form is decided by both.

    Args:
        name: what errors call the layer's experts.
        consume: the stack may be overwritten, so that its resident form can take its place.
    """
    matrix = gate_up if part == "gate_up" else down
    if fits_fragments(gate_up, down, entries) and isinstance(matrix, Nvfp4Matrix):
        packed = pack_nvfp4(matrix, device, f"{name}.{part}", consume)
        made = {"codes": packed.codes, "scales": packed.scales, "multipliers": packed.multipliers}
    else:
        if isinstance(matrix, DenseMatrix):
            matrix = DenseMatrix(matrix.weight.to(torch.bfloat16))
        made = stored_weight(matrix, device, wide=torch.bfloat16).tensors()
    return {f"{part}_{field}": value for field, value in made.items()}


def _of_part(part: Part, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}_"): tensor for name, tensor in tensors.items() if name.startswith(f"{part}_")}


def _decode_options(top_k: int, experts: int, shared: bool, rows: int, pdl: bool) -> dict[str, Any]:
    picks = triton.next_power_of_2(max(rows * top_k, 128))
    options = {"P": picks, "TOPK": top_k, "E": experts, "SHARED": shared, "ONE": rows == 1, "PDL": int(pdl)}
    # Of more rows than a tile has columns, some experts are read again.
    return {**options, "CACHE": "evict_first" if picks <= 128 else ".cg", "launch_pdl": pdl, "maxnreg": _REGISTERS}


def _gate_up_options(hidden: int, inner: int, limit: float | None = None) -> dict[str, Any]:
    ahead = min(_AHEAD, hidden // (128 * GATE_UP_WARPS))
    options = {"K": hidden, "I": inner, "W": GATE_UP_WARPS, "D": ahead, "num_warps": GATE_UP_WARPS}
    return {**options, "LIMIT": limit or 0.0}


def _down_options(hidden: int, inner: int) -> dict[str, Any]:
    warps = DOWN_WARPS if inner <= 4096 else GATE_UP_WARPS
    ahead = min(_AHEAD, inner // (128 * warps))
    return {"N": hidden, "K": inner, "W": warps, "R": _DOWN_TILES, "D": ahead, "num_warps": warps}


def compile_cases() -> list[CompileCase]:
    """Decode kernels of GLM-4.7's experts, whole and at tensor parallel 4, for every bound of the rows."""
    i32, bf16, f32 = torch.int32, torch.bfloat16, torch.float32
    cases = []
    for inner in (1536, 384):
        for rows in (1, 16, 32, 64):
            options = _decode_options(8, 160, True, rows, True)
            name = f"{inner} rows<={rows}" if rows > 1 else f"{inner} row 1"
            up, down = _gate_up_options(5120, inner), _down_options(5120, inner)
            args = (i32, i32, f32, i32, bf16, i32, 7, 56)
            cases.append(
                CompileCase(
                    f"experts gate+up 5120x{name}", decode_gate_up, args, {**up, **options, "FETCH": True}, stack=32
                )
            )
            args = (i32, i32, f32, i32, f32, i32, 7, 56)
            cases.append(CompileCase(f"experts down 5120x{name}", decode_down, args, {**down, **options}, stack=32))
    options = _gate_up_options(4096, 512, 10.0) | _decode_options(8, 288, False, 16, True)
    args = (i32, i32, f32, i32, bf16, i32, 7, 56)
    name = "experts gate+up 4096x512 with a limit, rows<=16"
    cases.append(CompileCase(name, decode_gate_up, args, {**options, "FETCH": True}, stack=32))
    return cases
