"""Speed of a resident image: writing it, and restoring it to a device.

    python benchmarks/image.py --device cuda --gib 32 --folder ~/.cache/dgpp/resident

The file is in the page cache after it was written; ``--drop`` asks the kernel to forget it first, which shows the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import torch

from dgpp_core.checkpoint.image_file import ImageReader, ImageWriter
from dgpp_core.checkpoint.image_key import ImageKey


def main() -> None:
    """Print gigabytes a second of both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="where the image is written  [default: temporary]")
    parser.add_argument("--drop", action="store_true", help="read from the disk, not from the page cache")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        _measure(Path(folder) / "image", torch.device(options.device), options.gib, options.drop)


def _measure(path: Path, device: torch.device, gib: float, drop: bool) -> None:
    key = ImageKey(model="", software="", checkpoint="", bindings="", world=1, rank=0, device="", dtype="")
    matrix = torch.randint(256, (1 << 28,), dtype=torch.uint8, device=device)
    count = max(1, round(gib * 4))
    started = time.perf_counter()
    writer = ImageWriter(path, device)
    for number in range(count):
        writer.add(str(number), "stored", {"codes": matrix})
    writer.commit(key, {})
    _print("written", count, started)
    if drop:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    for again in ("restored", "restored again"):
        started = time.perf_counter()
        reader = ImageReader(path, device)
        for entry in reader.directory.entries:
            reader.load(entry)
        if device.type == "cuda":
            torch.cuda.synchronize()
        _print(again, count, started)
        reader.close()


def _print(what: str, quarters: int, started: float) -> None:
    seconds = time.perf_counter() - started
    size = quarters * (1 << 28)
    print(f"{what:<15} {size / 2**30:6.2f} GiB  {seconds:7.2f} s  {size / seconds / 1e9:6.2f} GB/s")


if __name__ == "__main__":
    main()
