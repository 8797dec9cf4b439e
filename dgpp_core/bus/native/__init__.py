"""The posting loop in C, for transports whose port is a copy: compiled once, where there is a compiler.

Triton wants a C compiler at run time too, so a machine that runs kernels has one. What is compiled stays in the user's
cache, under a name that changes with the source.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from dgpp_core.api.errors import EngineError
from dgpp_core.bus.posting import LINGER, NAP
from dgpp_core.bus.slab import Slab

SOURCE = Path(__file__).with_name("posting.c")
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")
_COMPILING = 60.0


class _Loop(ctypes.Structure):
    """``struct loop`` of posting.c."""

    _fields_ = (
        ("slab", ctypes.c_void_p),
        ("peers", ctypes.POINTER(ctypes.c_void_p)),
        ("posted", ctypes.POINTER(ctypes.c_uint32)),
        ("slot_bytes", ctypes.c_uint64),
        ("linger", ctypes.c_uint64),
        ("nap", ctypes.c_uint64),
        ("world", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
    )


def cache_of(environ: Mapping[str, str]) -> Path:
    """Where compiled code is kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgpp" / "native"


def load(environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """The compiled loop.

    Raises:
        EngineError: there is no compiler, or it failed; says what it said.
    """
    name = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]
    path = cache_of(environ) / f"posting-{platform.machine()}-{name}.so"  # a home may be shared between machines
    if not path.exists():
        names = [environ["CC"]] if "CC" in environ else ["cc", "gcc", "clang"]
        compiler = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), None)
        if compiler is None:
            raise EngineError("there is no C compiler", where="PATH", expected="cc, gcc, clang or $CC")
        _compile(compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError("compiled code cannot be loaded", where=str(path), found=str(error)) from error


def _compile(compiler: str, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run(
                [compiler, *FLAGS, "-o", str(made), str(SOURCE)],
                check=True, capture_output=True, text=True, timeout=_COMPILING,
            )  # fmt: skip
            made.replace(path)
    except subprocess.CalledProcessError as error:
        raise EngineError("the posting loop does not compile", where=compiler, found=error.stderr[-500:]) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError("the posting loop cannot be compiled", where=str(path), found=str(error)) from error


class NativePoster:
    """The loop for a rank whose peers' slabs are mapped here. Implements `posting.Poster`; `run` is the loop itself.

    Args:
        peers: every rank's slab, in order of rank.
        library: from `load`.
    """

    def __init__(self, slab: Slab, rank: int, peers: Sequence[Slab], library: ctypes.CDLL) -> None:
        geometry = slab.geometry
        self._library, self._kept = library, (slab, tuple(peers))
        self._addresses = (ctypes.c_void_p * geometry.world)(*(peer.address for peer in peers))
        self._posted = (ctypes.c_uint32 * geometry.channels)()
        self._loop = _Loop(
            slab=slab.address,
            peers=self._addresses,
            posted=self._posted,
            slot_bytes=geometry.slot_bytes,
            linger=int(LINGER * 1e9),
            nap=int(NAP * 1e9),
            world=geometry.world,
            rank=rank,
            channels=geometry.channels,
        )

    def advance(self) -> bool:
        """Send what is ready; whether there was any."""
        return bool(self._library.dgpp_advance(ctypes.byref(self._loop)))

    def idle(self) -> bool:
        """A copy has arrived when it is made."""
        return True

    def run(self) -> None:
        """Turn until `stop`, outside the interpreter."""
        self._library.dgpp_run(ctypes.byref(self._loop))

    def stop(self) -> None:
        """Let `run` return."""
        self._loop.stop = 1
