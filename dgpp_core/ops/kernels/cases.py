"""One binary of a kernel, described well enough to be compiled where no GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

TARGETS = (90, 121)
"""Compute capabilities that every kernel must compile for: H200 and GB10."""


class CompileCase(Struct, frozen=True, eq=False):
    """A kernel with the arguments of one launch.

    Args:
        name: the kernel and what tells this binary from its others, for example ``dense_nvfp4 5120x12288 rows<=8``.
        kernel: the ``triton.jit`` or ``gluon.jit`` function.
        args: positional arguments; a torch dtype stands for a pointer to it, numbers stand for themselves.
        meta: constexpr arguments and compiler options (``num_warps``, ``num_stages``, ``maxnreg``, ``launch_pdl``).
        targets: the capabilities this binary is for.
        stack: bytes of local memory a thread may use; 0 refuses any spill.
    """

    name: str
    kernel: Any
    args: tuple[Any, ...]
    meta: Mapping[str, Any]
    targets: tuple[int, ...] = TARGETS
    stack: int = 0
