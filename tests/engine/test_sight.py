"""Encoding of images: one at a time, kept within bytes, failing for their own request alone."""

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from dgpp_core.api import Canvas, EngineError, Vision
from dgpp_core.engine.operations import Prefill
from dgpp_core.engine.pending import SlotInfo
from dgpp_core.engine.sight import Places, Sight
from dgpp_core.images.patches import grid_places, patches
from dgpp_core.images.picture import Picture, picture_digest

WIDTH = 4
CPU = torch.device("cpu")


def canvas(height: int, width: int, most: int) -> Canvas:
    return Canvas(height=height, width=width, content_height=height, content_width=width)


VISION = Vision(
    placeholder=7, patch_size=2, merge_size=2, frames=2, mean=(0.5,) * 3, std=(0.5,) * 3, most_tokens=64,
    canvas=canvas, positions="grid",
)  # fmt: skip


class Eyes:
    """An encoder that gives each square the mean of its patches, and counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.failing = False

    def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
        self.asked.append((rows, columns, *patches.shape))
        if self.failing:
            raise RuntimeError("out of memory")
        return patches.reshape(rows * columns, -1).mean(1, keepdim=True).expand(-1, WIDTH).contiguous()


def picture(seed: int, rows: int, columns: int, start: int = 0) -> Picture:
    height, width = 4 * rows, 4 * columns
    rgb = np.random.default_rng(seed).integers(0, 256, height * width * 3, dtype=np.uint8).tobytes()
    digest = picture_digest(height, width, rgb)
    return Picture(height=height, width=width, rgb=rgb, tokens=rows * columns, digest=digest, start=start)


def info(slot: int, *pictures: Picture) -> SlotInfo:
    return SlotInfo(slot, slot, (0,) * 64, False, 0, 0, pictures=pictures)


def test_an_image_is_encoded_once_however_often_it_comes() -> None:
    eyes = Eyes()
    sight = Sight(eyes, VISION, CPU)
    first, other = picture(1, 2, 3), picture(2, 2, 3)
    rows = sight.rows(first)
    assert sight.rows(msgspec.structs.replace(first, start=30)) is rows
    assert not torch.equal(sight.rows(other), rows)
    assert eyes.asked == [(2, 3, 24, 24)] * 2
    wanted = torch.from_numpy(patches(first, VISION)).reshape(6, -1).mean(1)
    assert torch.equal(rows[:, 0], wanted)


def test_rows_are_kept_within_bytes_the_latest_used_first() -> None:
    eyes = Eyes()
    size = 6 * WIDTH * 4
    sight = Sight(eyes, VISION, CPU, kept_bytes=2 * size)
    images = [picture(seed, 2, 3) for seed in range(3)]
    for image in (images[0], images[1], images[0], images[2]):
        sight.rows(image)
    assert sight.bytes == 2 * size
    before = len(eyes.asked)
    sight.rows(images[0])
    assert len(eyes.asked) == before
    sight.rows(images[1])
    assert len(eyes.asked) == before + 1
    alone = Sight(eyes, VISION, CPU, kept_bytes=1)
    assert alone.rows(images[0]) is alone.rows(images[0])


def test_rows_of_a_step_are_those_of_the_images_in_its_chunks() -> None:
    sight = Sight(Eyes(), VISION, CPU)
    first, second, third = picture(1, 2, 3, 5), picture(2, 1, 4, 20), picture(3, 2, 2, 2)
    ops = [Prefill(slot=0, start=8, count=14, last=False), Prefill(slot=1, start=0, count=4, last=False)]
    found = sight.seen(ops, [info(0, first, second), info(1, third)])
    assert found is not None
    assert found.rows.tolist() == [0, 1, 2, 12, 13, 14 + 2, 14 + 3]
    wanted = torch.cat([sight.rows(first)[3:], sight.rows(second)[:2], sight.rows(third)[:2]])
    assert torch.equal(found.values, wanted)
    assert sight.seen([Prefill(slot=0, start=11, count=9, last=False)], [info(0, first, second)]) is None


def test_what_cannot_be_encoded_is_said_and_leaves_nothing() -> None:
    eyes = Eyes()
    sight = Sight(eyes, VISION, CPU)
    good, bad = picture(1, 2, 3), picture(2, 2, 3)
    assert sight.fault([good]) == ""
    held = sight.bytes
    eyes.failing = True
    assert "out of memory" in sight.fault([good, bad])
    assert sight.fault([good]) == ""
    assert sight.bytes == held
    eyes.failing = False
    assert sight.fault([bad]) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_a_fault(value: float) -> None:
    class Broken(Eyes):
        def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
            return torch.full((rows * columns, WIDTH), value)

    assert "finite" in Sight(Broken(), VISION, CPU).fault([picture(1, 2, 3)])


def test_a_rank_that_is_gone_is_no_fault_of_an_image() -> None:
    """It ends the world, not one request."""

    class Lonely(Eyes):
        def see(self, patches: Tensor, rows: int, columns: int) -> Tensor:
            raise EngineError("a rank has left while others wait for it", where="rank 1")

    with pytest.raises(EngineError, match="a rank has left"):
        Sight(Lonely(), VISION, CPU).fault([picture(1, 2, 3)])


def test_a_slot_has_the_places_of_its_own_request() -> None:
    places = Places(VISION, 2, 40, CPU)
    own = torch.arange(40, dtype=torch.int32).expand(3, 40)
    image = picture(1, 2, 3, 5)
    places.begin(1, (image,))
    assert torch.equal(places.table[1], torch.from_numpy(grid_places(40, (image,), VISION)))
    assert places.table[1, :, 11].tolist() == [8, 8, 8]
    assert torch.equal(places.table[0], own)
    places.begin(1, ())
    assert torch.equal(places.table, own.expand(3, 3, 40))
