"""What a stored matrix's checkpoint tensors are, by storage name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dgpp_core.api.errors import CheckpointError, PluginError
from dgpp_core.formats.storage import STORAGES, block_after_cut, parts


def _required(storage: str, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = parts(storage, "a.b.weight", shape)
    return {part.name: (part.dtypes[0], part.shape) for part in found if part.use == "required"}


def test_the_tensors_of_each_storage() -> None:
    shape = (6, 256)
    assert _required("dense", shape) == {"a.b.weight": ("F32", shape)}
    assert _required("nvfp4", shape) == {
        "a.b.weight": ("U8", (6, 128)),
        "a.b.weight_scale": ("F8_E4M3", (6, 16)),
        "a.b.weight_scale_2": ("F32", ()),
    }
    assert _required("nvfp4_ct", shape) == {
        "a.b.weight_packed": ("U8", (6, 128)),
        "a.b.weight_scale": ("F8_E4M3", (6, 16)),
        "a.b.weight_global_scale": ("F32", ()),
    }
    assert _required("mxfp4", shape) == {"a.b.weight": ("U8", (6, 128)), "a.b.scale": ("F8_E8M0", (6, 8))}
    assert _required("fp8_channel", shape) == {"a.b.weight": ("F8_E4M3", shape), "a.b.weight_scale": ("F32", (6,))}
    assert _required("int4_g64", shape) == {
        "a.b.weight_packed": ("I32", (6, 32)),
        "a.b.weight_scale": ("BF16", (6, 4)),
    }
    assert _required("int8_g128", shape) == {
        "a.b.weight_packed": ("I32", (6, 64)),
        "a.b.weight_scale": ("F16", (6, 2)),
    }
    assert _required("code3_g128", shape) == {
        "a.b.weight_indices": ("I32", (6, 24)),
        "a.b.weight_scale": ("BF16", (6, 2)),
    }


def test_the_last_block_may_be_partial() -> None:
    assert _required("fp8_block", (130, 200))["a.b.weight_scale_inv"] == ("F32", (2, 2))
    assert _required("fp8_e8m0_32", (130, 200))["a.b.scale"] == ("F8_E8M0", (5, 7))


def test_activation_scales_are_ignored_and_a_stated_shape_is_optional() -> None:
    uses = {part.suffix: part.use for storage in STORAGES for part in parts(storage, "w.weight", (128, 128))}
    assert {suffix for suffix, use in uses.items() if use == "ignored"} == {"input_scale", "input_global_scale"}
    assert {suffix for suffix, use in uses.items() if use == "optional"} == {"weight_shape"}


def test_a_scalar_may_be_a_vector_of_one_and_row_scales_a_column() -> None:
    scalar = parts("nvfp4", "w.weight", (2, 32))[2]
    assert scalar.fits(())
    assert scalar.fits((1,))
    assert not scalar.fits((2,))
    rows = parts("fp8_channel", "w.weight", (4, 32))[1]
    assert rows.fits((4,))
    assert rows.fits((4, 1))
    assert not rows.fits((1, 4))


def test_a_dense_tensor_has_any_name_and_rank() -> None:
    (part,) = parts("dense", "a.bias", (7,))
    assert (part.name, part.shape) == ("a.bias", (7,))


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "dense" and not name.startswith("fp8")])
def test_columns_that_are_no_whole_groups_are_refused(storage: str) -> None:
    with pytest.raises(CheckpointError, match=f"a.weight cannot be stored as {storage}"):
        parts(storage, "a.weight", (4, 24))


def test_faults_of_a_binding_table_are_named() -> None:
    with pytest.raises(PluginError, match=r"'nvfp5' of a\.weight"):
        parts("nvfp5", "a.weight", (4, 32))
    with pytest.raises(PluginError, match="named by its weight"):
        parts("nvfp4", "a.weight_packed", (4, 32))
    with pytest.raises(CheckpointError, match="not a matrix"):
        parts("nvfp4", "a.weight", (4,))


@pytest.mark.parametrize(
    ("start", "count", "size", "edge"),
    [(0, 576, 576, 128), (128, 256, 512, 128), (192, 192, 576, 64), (0, 192, 576, 64), (96, 96, 384, 32)],
)
def test_blocks_after_a_cut(start: int, count: int, size: int, edge: int) -> None:
    assert block_after_cut(128, start, count, size) == edge


def test_blocks_that_become_too_small_are_refused() -> None:
    with pytest.raises(CheckpointError, match="too small") as caught:
        block_after_cut(128, 4, 4, 256)
    assert set(caught.value.parts()) == {"what", "where", "found", "expected", "hint"}


def test_the_table_needs_no_torch() -> None:
    code = "import sys, dgpp_core.formats.storage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
