"""Repositories of the Hugging Face hub: the local cache, and fetching into it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.progress import Progress

WANTED = ["*.json", "*.jinja", "*.safetensors"]


def from_cache(repository: str, hub: Path | None) -> Path | None:
    """The newest snapshot of ``repository`` in the cache ``hub``, complete or not; None where there is none."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, cache_dir=hub, local_files_only=True, allow_patterns=WANTED))
    except (OSError, ValueError):
        return None


def download(repository: str, hub: Path | None, report: Progress, endpoint: str | None = None) -> Path:
    """Fetch ``repository`` into the cache ``hub`` and give its folder.

    Raises:
        CheckpointError: no network, no such repository, no permission, or no room.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        """Passes on the bytes of the hub's progress bars instead of drawing them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.unit == "B" and self.total:
                report(f"fetching {repository}", int(self.n), int(self.total))
            return shown

    try:
        return Path(
            snapshot_download(repository, cache_dir=hub, allow_patterns=WANTED, tqdm_class=Bar, endpoint=endpoint)
        )
    except (OSError, ValueError) as error:
        raise CheckpointError("fetching failed", where=repository, found=str(error).strip().split("\n")[0]) from error
