"""Golden vectors of the stored formats, made by an implementation in numpy that shares nothing with the product."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="session")
def golden() -> dict[str, Tensor]:
    """Arrays by name. Unsigned words are held as the int32 or int16 of the same bits."""
    signed = {"uint32": "int32", "uint16": "int16"}
    with np.load(Path(__file__).parent / "golden" / "number_formats.npz") as file:
        return {
            key: torch.from_numpy(file[key].view(signed.get(str(file[key].dtype), file[key].dtype))) for key in file
        }
