"""C beside the Python, for what must not wait for an interpreter: compiled once, where there is a compiler.

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

FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC")
_COMPILING = 60.0


def cache_of(environ: Mapping[str, str]) -> Path:
    """Where compiled code is kept."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dgpp" / "native"


def compiled(
    source: Path,
    headers: Sequence[Path] = (),
    libraries: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> ctypes.CDLL:
    """The code of ``source``, which includes ``headers`` and is linked with ``libraries`` (as options of a compiler).

    Raises:
        EngineError: there is no compiler, or it failed; says what it said.
    """
    texts = b"".join(path.read_bytes() for path in (source, *headers))
    told = hashlib.sha256(texts + repr(FLAGS).encode()).hexdigest()
    name = f"{source.stem}-{platform.machine()}-{told[:16]}.so"  # a home may be shared between machines
    path = cache_of(environ) / name
    if not path.exists():
        names = [environ["CC"]] if "CC" in environ else ["cc", "gcc", "clang"]
        compiler = next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), None)
        if compiler is None:
            raise EngineError("there is no C compiler", where="PATH", expected="cc, gcc, clang or $CC")
        _compile(compiler, (*FLAGS, str(source), *libraries), path)
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
        raise EngineError("C code does not compile", where=compiler, found=found) from error
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError("C code cannot be compiled", where=str(path), found=str(error)) from error
