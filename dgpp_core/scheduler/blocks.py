"""The KV block pool: which block ids are free. Who shares a block is the prefix index's business."""

from __future__ import annotations

from collections.abc import Iterable

from dgpp_core.api.errors import EngineError


class BlockPool:
    """Block ids 1 .. ``total``, each free or handed out to exactly one owner (a request or a node of the prefix index).

    A freed block is the next one handed out: the device executes in order, so what still runs on it comes first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))
        self._out = bytearray(total + 1)

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Blocks handed out."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` blocks, which must be free."""
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._out[block] = 1
        return blocks

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            EngineError: a block was free already.
        """
        for block in blocks:
            if not self._out[block]:
                raise EngineError("a KV block was freed twice", found=f"block {block}", hint="report this as a bug")
            self._out[block] = 0
            self._free.append(block)
