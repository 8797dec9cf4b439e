"""A file system that is small enough to be filled."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A folder on a file system of its own, of 256 KiB.

    Raises:
        subprocess.CalledProcessError: it cannot be mounted; that takes root.
    """
    with tempfile.TemporaryDirectory() as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", name], check=True, capture_output=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def fill(folder: Path) -> None:
    """Leave no room on its file system."""
    with (folder / "filling").open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return
