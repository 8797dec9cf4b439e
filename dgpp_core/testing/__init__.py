"""Public tools for tests: the conformance kit, the exactness matrix, an in-process world, fake engines.

Nothing is imported here but on request, so that the light parts stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dgpp_core.testing.conformance import ModelConformance
    from dgpp_core.testing.images import ImageConformance
    from dgpp_core.testing.known_drafts import DraftConformance
    from dgpp_core.testing.matrix import Axes, exactness_matrix
    from dgpp_core.testing.tensor_parallel import TensorParallelWorld
    from dgpp_core.testing.world import World

__all__ = [
    "Axes", "DraftConformance", "ImageConformance", "ModelConformance", "TensorParallelWorld", "World",
    "exactness_matrix",
]  # fmt: skip

_HOMES = {
    "ModelConformance": "conformance", "ImageConformance": "images",
    "DraftConformance": "known_drafts", "Axes": "matrix", "exactness_matrix": "matrix",
    "TensorParallelWorld": "tensor_parallel", "World": "world",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
