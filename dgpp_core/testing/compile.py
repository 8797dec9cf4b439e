"""Kernels compiled for GPUs that are not here.

`compile_for` compiles one kernel in this process and leaves a stand-in for Triton's GPU driver behind, so a process
that also launches kernels must not call it: `compile_all` works in processes of its own. Never import a module with
kernels with ``TRITON_INTERPRET`` set and compile it here.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
from collections.abc import Container, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from msgspec import Struct

import dgpp_core.ops.kernels
from dgpp_core.ops.kernels.cases import CompileCase
from dgpp_core.testing.cubin import resources

SHARED_LIMIT = {90: 232448, 121: 101376}
"""Bytes of shared memory that one block may have, by compute capability."""

_MMA = re.compile(r"(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


class Compiled(Struct, frozen=True):
    """What the compiler made of one case. ``failure`` is the compiler's message, empty when all went well."""

    module: str
    name: str
    target: int
    registers: int = 0
    shared: int = 0
    stack: int = 0
    mma: tuple[str, ...] = ()
    ptx: str = ""
    failure: str = ""


class StandInDriver:
    """What Triton asks of a GPU driver before a launch, answered for one compute capability."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # Triton keeps what it compiled by device: one number for each target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")


def compile_for(capability: int, kernel: Any, *args: Any, **meta: Any) -> Any:
    """Triton's compiled kernel (``asm``, ``metadata``) of one launch.

    Args:
        args: torch dtypes stand for pointers, numbers for scalars.
        meta: constexpr arguments and compiler options.

    Raises:
        Whatever the compiler raises.
    """
    from triton.runtime.driver import driver

    driver.set_active(StandInDriver(capability))
    return kernel.warmup(*args, grid=(1,), **meta)


def kernel_modules() -> list[str]:
    """Names of the kernel modules that state their binaries, in order."""
    package = dgpp_core.ops.kernels
    names = sorted(f"{package.__name__}.{module.name}" for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if hasattr(importlib.import_module(name), "compile_cases")]


def cases_of(module: str) -> tuple[CompileCase, ...]:
    """Every binary that ``module`` states."""
    return tuple(importlib.import_module(module).compile_cases())


def compile_case(module: str, index: int, target: int) -> Compiled:
    """One binary, in this process; a failure is reported in the result."""
    case = cases_of(module)[index]
    try:
        made = compile_for(target, case.kernel, *case.args, **case.meta)
        registers, stack = resources(made.asm["cubin"])
    except Exception as error:  # a compiler may raise anything
        return Compiled(module, case.name, target, failure=_innermost(error))
    mma = tuple(sorted(set(_MMA.findall(made.asm["ptx"]))))
    return Compiled(module, case.name, target, registers, made.metadata.shared, stack, mma, made.asm["ptx"])


def _innermost(error: BaseException) -> str:
    """The error at the bottom: a compiler names the outer functions first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-2000:]


def compile_all(
    modules: Iterable[str],
    targets: Iterable[int] = (90, 121),
    processes: int = 0,
    *,
    only: Container[tuple[str, int]] | None = None,
) -> list[Compiled]:
    """Every binary of ``modules`` for those of ``targets`` it is meant for, in processes of their own.

    What is compiled also lands in Triton's cache, so a GPU process of the same installation starts warm.

    Args:
        processes: how many at once; 0 takes one a processor.
        only: names and targets of the binaries that are wanted, where not all are.
    """
    wanted = set(targets)
    jobs = [
        (module, index, target)
        for module in modules
        for index, case in enumerate(cases_of(module))
        for target in sorted(wanted & set(case.targets))
        if only is None or (case.name, target) in only
    ]
    workers = min(processes or os.cpu_count() or 1, max(len(jobs), 1))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(compile_case, *zip(*jobs, strict=True))) if jobs else []


def problems(made: Compiled, case: CompileCase) -> list[str]:
    """What is wrong with a binary: it failed, spills or wants more shared memory than a block may have."""
    if made.failure:
        return [made.failure]
    found = []
    if made.shared > SHARED_LIMIT[made.target]:
        found.append(f"{made.shared} bytes of shared memory, {SHARED_LIMIT[made.target]} are there")
    if made.stack > case.stack:
        found.append(f"{made.stack} bytes of stack a thread (spills), {case.stack} allowed")
    return found
