"""Posting loops in C: compiled once, where there is a compiler.

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
from dgpp_core.bus.slab import Geometry, Slab

FOLDER = Path(__file__).parent
FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")
LIBRARIES = {"posting": (), "verbs": ("-libverbs",)}
"""What each source is linked with."""
_COMPILING = 60.0


class Layout(ctypes.Structure):
    """``struct layout`` of layout.h."""

    _fields_ = (
        ("slot_bytes", ctypes.c_uint64),
        ("world", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("channels", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )

    @classmethod
    def of(cls, geometry: Geometry, rank: int) -> Layout:
        """A rank's."""
        return cls(geometry.slot_bytes, geometry.world, rank, geometry.channels, 0)


class _Loop(ctypes.Structure):
    """``struct loop`` of posting.c."""

    _fields_ = (
        ("layout", Layout),
        ("slab", ctypes.c_void_p),
        ("peers", ctypes.POINTER(ctypes.c_void_p)),
        ("posted", ctypes.POINTER(ctypes.c_uint32)),
        ("linger", ctypes.c_uint64),
        ("nap", ctypes.c_uint64),
        ("stop", ctypes.c_uint32),
    )


def cache_of(environ: Mapping[str, str]) -> Path:
    """Where compiled code is kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgpp" / "native"


def load(name: str = "posting", environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """A compiled source: ``posting`` or ``verbs``.

    Raises:
        EngineError: there is no compiler, or it failed; says what it said.
    """
    source = FOLDER / f"{name}.c"
    flags = (*FLAGS, str(source), *LIBRARIES[name])
    told = hashlib.sha256(source.read_bytes() + (FOLDER / "layout.h").read_bytes() + repr(FLAGS).encode()).hexdigest()
    path = cache_of(environ) / f"{name}-{platform.machine()}-{told[:16]}.so"  # a home may be shared between machines
    if not path.exists():
        names = [environ["CC"]] if "CC" in environ else ["cc", "gcc", "clang"]
        compiler = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), None)
        if compiler is None:
            raise EngineError("there is no C compiler", where="PATH", expected="cc, gcc, clang or $CC")
        _compile(compiler, flags, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineError("compiled code cannot be loaded", where=str(path), found=str(error)) from error


def _compile(compiler: str, flags: Sequence[str], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, "-o", str(made), *flags]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING)
            made.replace(path)
    except subprocess.CalledProcessError as error:
        found = error.stderr.strip()[:500]
        raise EngineError("the posting loop does not compile", where=compiler, found=found) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError("the posting loop cannot be compiled", where=str(path), found=str(error)) from error


class NativePoster:
    """The loop for a rank whose peers' slabs are mapped here. Implements `posting.Poster`.

    Args:
        peers: every rank's slab, in order of rank.
        library: from `load`.
    """

    def __init__(self, slab: Slab, rank: int, peers: Sequence[Slab], library: ctypes.CDLL) -> None:
        self._library, self._kept = library, (slab, tuple(peers))
        self._loop = _Loop(
            layout=Layout.of(slab.geometry, rank),
            slab=slab.address,
            peers=(ctypes.c_void_p * slab.geometry.world)(*(peer.address for peer in peers)),
            posted=(ctypes.c_uint32 * slab.geometry.channels)(),
            linger=int(LINGER * 1e9),
            nap=int(NAP * 1e9),
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
