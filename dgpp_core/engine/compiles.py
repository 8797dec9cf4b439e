"""Which kernels Triton makes ready in this process: after READY there must be no more of them."""

from __future__ import annotations

from typing import Any


class CompileCounter:
    """Names of the kernel variants that were compiled, or first loaded from the disk cache, since `install`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def install(self) -> None:
        """Have Triton report to this counter, for the rest of the process; nothing without Triton."""
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.runtime.jit_post_compile_hook = self._note

    def _note(self, *, repr: str = "", **rest: Any) -> None:  # noqa: A002  (Triton's own keyword)
        self.names.append(repr)
