"""Dense matrices that are kept in 8 bits: what the encoder makes of the whole matrix, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dgpp_core.api import Binding, BindingTable, CheckpointError, ConfigError, ModelSpec
from dgpp_core.checkpoint.headers import ROUNDED_ROWS, read_headers
from dgpp_core.checkpoint.loader import CheckpointWeights
from dgpp_core.checkpoint.parameters import parameters
from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.fp8 import Fp8BlockMatrix
from dgpp_core.formats.matrix import Matrix

CPU = torch.device("cpu")
SHAPE = (ROUNDED_ROWS + 320, 256)


def table(cut: int | None = None, fused: tuple[int, ...] = ()) -> BindingTable:
    large = Binding(name="a.weight", shape=SHAPE, target="t", cut=cut, fused=fused)
    low = Binding(name="b.weight", shape=(64, SHAPE[1]), target="t", cut=cut)
    other = Binding(name="c.weight", shape=(8, 16), target="router")
    return BindingTable((large, low, other), roundable=("t",))


def taken(made: BindingTable, folder: Path, target: str, rank: int = 0, world: int = 1, rounded: bool = True) -> Matrix:
    served = made.for_serving(drafting=True, rounded=rounded)
    return CheckpointWeights(
        served, read_headers(folder), device=CPU, dtype=torch.float32, rank=rank, world=world
    ).matrix(target)


def values(made: BindingTable, folder: Path) -> list[Tensor]:
    """Of both matrices, dense."""
    whole = taken(made, folder, "t", rounded=False).dequantise()
    return [whole[: SHAPE[0]], whole[SHAPE[0] :]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from dgpp_core.host.loading import load_plugins

    path, spec = tmp_path_factory.mktemp("dense"), load_plugins(environ={}).model("glm47").spec
    synthesise(spec, table(), spec.tiny_config, path, seed=1)
    return path


def test_codes_and_scales_are_the_encoders(folder: Path) -> None:
    """Also where the matrix is rounded in pieces."""
    made = table()
    both = [decode("fp8_block", encode("fp8_block", part), (len(part), SHAPE[1])) for part in values(made, folder)]
    assert isinstance(both[0], Fp8BlockMatrix)
    found, expected = taken(made, folder, "t"), Fp8BlockMatrix.stack(both)  # type: ignore[arg-type]
    assert isinstance(found, Fp8BlockMatrix)
    assert torch.equal(found.codes.view(torch.uint8), expected.codes.view(torch.uint8))
    assert (found.block, found.scales.tolist()) == (expected.block, expected.scales.tolist())
    assert type(taken(made, folder, "router")) is not Fp8BlockMatrix, "what is not named stays dense"


def test_every_code_is_the_nearest_under_the_scale_of_its_block(folder: Path) -> None:
    """By trying all of them, with a scale that takes the block's largest value to 448."""
    made = table()
    weight, found = values(made, folder)[0][:300], taken(made, folder, "t")
    assert isinstance(found, Fp8BlockMatrix)
    levels = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = torch.tensor(sorted(set(levels[levels.isfinite()].tolist())), dtype=torch.float64)
    for row, column in ((0, 0), (128, 128), (256, 0)):
        block = weight[row : row + 128, column : column + 128].double()
        scale = (block.abs().max().float() / 448).double()
        held = found.codes[row : row + len(block), column : column + 128].double()
        off = (block / scale - held).abs()
        middles = (levels[1:] + levels[:-1]) / 2
        nearest = (block / scale).unsqueeze(-1).sub(levels[torch.bucketize(block / scale, middles)].unsqueeze(-1)).abs()
        assert (off <= nearest.squeeze(-1) + 1e-4).all(), "but for the last bit of a division in float32"
        assert held.abs().max() == 448


@pytest.mark.parametrize(("cut", "fused"), [(0, ()), (1, ()), (0, (ROUNDED_ROWS, 320))])
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_have_parts_of_the_matrix_that_one_has(
    folder: Path, cut: int, fused: tuple[int, ...], world: int
) -> None:
    made = table(cut, fused)
    whole = taken(made, folder, "t").dequantise()
    large, low = whole[: SHAPE[0]], whole[SHAPE[0] :]
    for rank in range(world):
        held = taken(made, folder, "t", rank, world)
        pieces = [part.chunk(world, cut)[rank] for part in (*torch.split(large, list(fused or (len(large),))), low)]
        assert torch.equal(held.dequantise(), torch.cat(pieces))
        served = made.for_serving(drafting=True, rounded=True)
        assert parameters(served, world)["t"].bytes("cuda") == sum(t.nbytes for t in held.tensors().values())


def test_a_matrix_with_what_is_no_number_is_refused(tmp_path: Path, spec: ModelSpec) -> None:
    from safetensors.torch import load_file, save_file

    made = table()
    synthesise(spec, made, spec.tiny_config, tmp_path, seed=1)
    file = next(iter(read_headers(tmp_path).values())).file
    tensors = load_file(file)
    tensors["a.weight"][5, 7] = torch.nan
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"a\.weight"):
        taken(made, tmp_path, "t")


def test_a_model_that_keeps_what_it_has_says_so() -> None:
    plain = BindingTable((Binding(name="n.weight", shape=(4, 4), target="n"),))
    with pytest.raises(ConfigError) as refused:
        plain.for_serving(drafting=False, rounded=True)
    assert refused.value.where == "engine.dense_weights"
