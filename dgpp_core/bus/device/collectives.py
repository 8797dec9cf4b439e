"""Collectives on tensors of a CUDA device, over a slab in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dgpp_core.api import EngineError
from dgpp_core.bus.call import Call
from dgpp_core.bus.device import kernel
from dgpp_core.bus.device.launch import meta_of, require_geometry, tag_of, tensor_of, words_of
from dgpp_core.bus.link import Link
from dgpp_core.bus.posting import PostingThread

PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister."""
LEAVING = 2.0
"""Seconds for what is still ready when a rank leaves."""


class KernelCollectives:
    """Implements `slab_bus.DeviceCollectives`. All launches of a rank must be on one stream, or one after another.

    Args:
        link: connected; its slab is registered with the device here.
        timeout: seconds that a kernel waits for a peer before it gives up.
        failed: told, in a thread, why the posting loop ended.

    Raises:
        EngineError: the memory cannot be registered.
    """

    def __init__(
        self, rank: int, link: Link, device: torch.device, *, timeout: float, failed: Callable[[str], None]
    ) -> None:
        self._rank, self._link, self._place = rank, link, device
        self._slab, self._geometry = link.slab, link.slab.geometry
        self._limit, self._tell, self._lost = int(timeout * 1e9), failed, ""
        require_geometry(self._geometry)
        with torch.cuda.device(device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = runtime.cudaHostRegister(self._slab.address, self._geometry.size, PORTABLE_AND_MAPPED)
        if int(status) != 0:
            what, where = "shared memory cannot be registered with the device", f"rank {rank}, {device}"
            raise EngineError(what, where=where, found=str(status), hint="raise the limit of locked memory")
        self._runtime = runtime
        self._words = torch.from_numpy(self._slab.bytes).view(torch.int32)
        self._state = torch.zeros(self._geometry.channels + 1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        self._posting: PostingThread | None = None

    def start(self, posting: PostingThread) -> None:
        """From now on rows that kernels make ready go out."""
        self._posting = posting

    def failed(self, error: EngineError) -> None:
        """The posting loop ended."""
        self._lost = error.line()
        self.abort((1 << self._geometry.world) - 1)
        self._tell(self._lost)

    def all_reduce(self, call: Call, partial: Tensor) -> Tensor:
        """The fold of every rank's ``partial``, launched on the current stream."""
        if self._geometry.world == 1:
            return partial.contiguous()
        given = words_of(partial)
        total, tag = torch.empty_like(given), tag_of(call)
        blocks = self._geometry.channels * self._geometry.slot_bytes // 4
        striped = len(given) > blocks and self._geometry.world > 2
        step = blocks * self._geometry.world if striped else blocks
        for start in range(0, len(given), step):
            x, out = given[start : start + step], total[start : start + step]
            self._launch(x, out, tag, partial.dtype, reduce=True, striped=striped)
            if striped:
                self._launch(out, out, tag, partial.dtype, reduce=False, striped=True)
        return tensor_of(total, partial)

    def all_gather(self, call: Call, part: Tensor) -> list[Tensor]:
        """Every rank's part, launched on the current stream."""
        world = self._geometry.world
        if world == 1:
            return [part]
        given, tag = words_of(part), tag_of(call)
        step = self._geometry.channels * self._geometry.slot_bytes // 4
        pieces = []
        for start in range(0, len(given), step):
            x = given[start : start + step]
            out = x.new_empty(world, len(x))
            self._launch(x, out, tag, part.dtype, reduce=False, striped=False)
            pieces.append(out)
        if not pieces:
            return [part] * world
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        return [tensor_of(row, part) for row in rows]

    def fault(self) -> EngineError | None:
        """What a kernel or the posting loop gave up on, if one did."""
        if self._lost:
            return EngineError("the posting loop ended", where=f"rank {self._rank}", found=self._lost)
        word = self._slab.fault
        if not word:
            return None
        generation, channel, missing, code = word & 0xFFFFFFFF, word >> 32 & 0xFFFF, word >> 48 & 0xFF, word >> 56
        if code == kernel.DAMAGED:
            what, found = self._unlike(channel, generation)
        else:
            ranks = ", ".join(str(rank) for rank in range(self._geometry.world) if missing >> rank & 1)
            what = f"no answer from rank {ranks} in a collective on the device"
            found = "nothing within the time limit" if code == kernel.SILENT else "the wait was given up"
        where = f"rank {self._rank} of {self._geometry.world}, channel {channel}, exchange {generation}"
        return EngineError(what, where=where, found=found, expected="every rank takes part in time")

    def abort(self, missing: int) -> None:
        """Let kernels that wait for one of these ranks (bits) leave."""
        self._slab.abort = missing

    def finish(self) -> None:
        """Wait for the device, then end the posting loop when all is sent."""
        torch.cuda.synchronize(self._place)
        if self._posting is not None:
            self._posting.stop(LEAVING)

    def close(self) -> None:
        """Give the memory back."""
        with torch.cuda.device(self._place):
            self._runtime.cudaHostUnregister(self._slab.address)
        self._link.close()

    def _launch(self, x: Tensor, out: Tensor, tag: int, dtype: torch.dtype, *, reduce: bool, striped: bool) -> None:
        words = self._geometry.slot_bytes // 4 * (self._geometry.world if striped else 1)
        meta = meta_of(self._geometry, self._rank, dtype, reduce=reduce, striped=striped)
        grid = (-(-len(x) // words),)
        kernel.exchange[grid](x, out, self._words, self._state, len(x), tag, self._limit, **meta)

    def _unlike(self, channel: int, generation: int) -> tuple[str, str]:
        """Whose message a kernel could not take, and why."""
        mine = self._slab.header(self._geometry.row(channel, generation))
        for source in range(self._geometry.world):
            if source != self._rank:
                offset = self._geometry.slot(source, channel, generation)
                header = self._slab.header(offset)
                if self._slab.take(offset, source, generation) is None:
                    return f"a message of rank {source} arrived damaged", "one that does not fit its seal"
                if (header.size, header.tag) != (mine.size, mine.tag):
                    found = f"rank {source}: {header.size} bytes, tag {header.tag}"
                    return "the ranks issued different collectives on their devices", found
        return "a message arrived damaged", "one that fits its seal by now"
