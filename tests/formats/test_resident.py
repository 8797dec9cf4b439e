"""Resident bytes against the tensors that torch really makes."""

from __future__ import annotations

import pytest
import torch

from dgpp_core.formats.resident import packed_linear_bytes, resident_bytes

SHAPES = [
    (1, 1),
    (1, 576),
    (2, 3),
    (15, 15),
    (16, 16),
    (63, 17),
    (64, 64),
    (65, 64),
    (100, 100),
    (576, 577),
    (1000, 37),
]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_packed_bytes_are_those_of_onednn(rows: int, columns: int) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(rows, columns), 8)
    actual = torch.ops.mkldnn._nbytes(packed)
    if actual == 4 * rows * columns:
        assert packed_linear_bytes(rows, columns) >= actual  # a CPU that packs nothing
    else:
        assert packed_linear_bytes(rows, columns) == actual


def test_roles_and_devices() -> None:
    assert resident_bytes("embedding", (100, 10), "cpu") == 4000
    assert resident_bytes("vector", (7,), "cpu") == 28
    assert resident_bytes("linear", (100, 10), "cpu") == 128 * 16 * 4
    assert resident_bytes("linear", (3, 100, 10), "cpu") == 3 * 128 * 16 * 4
    assert resident_bytes("linear", (100, 10), "cuda") == 2000
    assert resident_bytes("vector", (), "cpu") == 4
