"""Canvases, token counts and patches are those of the processors in transformers."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from dgpp_glm.vision_canvas import flash_vision as glm_vision
from dgpp_qwen.vision_canvas import flash_vision as qwen_vision
from PIL import Image

from dgpp_core.api import RequestError, Vision
from dgpp_core.images.decode import lay_out
from dgpp_core.images.patches import grid_places, patches
from dgpp_core.images.picture import Picture

SIZES = (
    (1, 1), (28, 28), (37, 100), (100, 37), (256, 256), (333, 77), (112, 144), (80, 80), (16, 1500), (1500, 17),
    (480, 640), (641, 479), (720, 1280), (1000, 1000), (1080, 1920), (1023, 1025), (1337, 311), (31, 33), (896, 896),
    (1300, 1301),
)  # fmt: skip
"""Heights and widths: squares, edges of them, too small, too large for 1,024 tokens, long ones."""
SQUARE = {"glm": 28, "qwen": 32}


def glm_processor(most: int | None) -> Any:
    from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

    options: dict[str, Any] = {"max_image_tokens": most or 8000}
    return Glm5NextImageProcessorPil(**options)


def qwen_processor(most: int | None) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    longest = 16_777_216 if most is None else most * 1024
    size = {"shortest_edge": 65_536, "longest_edge": longest}
    return Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)


FAMILIES: dict[str, tuple[Vision, Callable[[int | None], Any]]] = {
    "glm": (glm_vision({}, 9), glm_processor),
    "qwen": (qwen_vision({}, 9), qwen_processor),
}


def noise(height: int, width: int) -> Image.Image:
    source = np.random.default_rng(height * 10_007 + width)
    return Image.fromarray(source.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("most", [None, 1024, 256])
@pytest.mark.parametrize("family", FAMILIES)
def test_token_counts_of_many_sizes(family: str, most: int | None) -> None:
    vision, reference = FAMILIES[family]
    processor = reference(most)
    options = {"max_image_tokens": most} if family == "glm" and most else {}
    source = np.random.default_rng(5)
    drawn = [tuple(source.integers(1, limit, 2).tolist()) for limit in (60, 700, 5000) for _ in range(200)]
    for height, width in (*SIZES, *drawn):
        if family == "qwen" and max(height, width) > 200 * min(height, width):
            continue
        found = vision.tokens(vision.canvas(height, width, most or vision.most_tokens))
        assert found * 4 == processor.get_number_of_image_patches(height, width, options), (height, width)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_patches_are_those_of_the_processor(family: str, size: tuple[int, int]) -> None:
    vision, reference = FAMILIES[family]
    image = noise(*size)
    wanted = reference(1024)(images=[image], return_tensors="np")
    picture = lay_out(image, vision, 1024)
    _, rows, columns = wanted["image_grid_thw"][0].tolist()
    assert vision.grid(picture.height, picture.width) == (rows // 2, columns // 2)
    assert picture.tokens == rows * columns // 4
    found = patches(picture, vision)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wanted["pixel_values"])


def test_an_image_too_long_for_qwen_is_refused() -> None:
    with pytest.raises(RequestError, match="200 times") as caught:
        FAMILIES["qwen"][0].canvas(1, 201, 1024)
    assert (caught.value.status, caught.value.code) == (400, "invalid_image")


def test_positions_are_those_of_the_class() -> None:
    """Two images, one higher than wide and one wider than high, in a text."""
    import torch
    from transformers import Qwen4ExpConfig
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpModel

    vision = FAMILIES["qwen"][0]
    whole = Qwen4ExpConfig()
    grids, texts = [(6, 4), (2, 10)], [7, 3, 5]
    tokens = [rows * columns // 4 for rows, columns in grids]
    kinds = [0] * texts[0] + [1] * tokens[0] + [0] * texts[1] + [1] * tokens[1] + [0] * texts[2]
    shell = type("Shell", (), {"config": whole, "get_vision_position_ids": Qwen4ExpModel.get_vision_position_ids})()
    reference: Any = Qwen4ExpModel.get_rope_index
    wanted, delta = reference(
        shell, torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]),
        image_grid_thw=torch.tensor([(1, *grid) for grid in grids]),
    )  # fmt: skip
    starts = [texts[0], texts[0] + tokens[0] + texts[1]]
    pictures = [
        Picture(height=rows * 16, width=columns * 16, rgb=b"", tokens=count, digest=b"", start=start)
        for (rows, columns), count, start in zip(grids, tokens, starts, strict=True)
    ]
    found = grid_places(len(kinds) + 4, pictures, vision)
    assert found[:, : len(kinds)].tolist() == wanted[:, 0].tolist()
    later = np.arange(len(kinds), len(kinds) + 4) + int(delta[0])
    assert found[:, len(kinds) :].tolist() == [later.tolist()] * 3


@pytest.mark.parametrize("field", ["height", "width"])
def test_sides_are_part_of_the_digest(field: str) -> None:
    first = lay_out(Image.new("RGB", (320, 256)), FAMILIES["qwen"][0], 1024)
    turned = lay_out(Image.new("RGB", (256, 320)), FAMILIES["qwen"][0], 1024)
    assert first.rgb == turned.rgb
    assert first.digest != turned.digest
    assert getattr(first, field) != getattr(turned, field)


def test_one_pixel_is_part_of_the_digest() -> None:
    image = noise(256, 256)
    same = lay_out(image.copy(), FAMILIES["qwen"][0], 1024)
    first = lay_out(image, FAMILIES["qwen"][0], 1024)
    assert same == first
    image.putpixel((7, 9), tuple((value + 1) % 256 for value in image.getpixel((7, 9))))  # type: ignore[union-attr]
    changed = lay_out(image, FAMILIES["qwen"][0], 1024)
    assert changed.digest != first.digest


@pytest.mark.parametrize("make", [glm_vision, qwen_vision])
@pytest.mark.parametrize("changed", [{"patch_size": 15}, {"image_mean": [0.1] * 3}, {"resample": 2}])
def test_another_processor_is_refused_by_name(make: Callable[..., Vision], changed: dict[str, Any]) -> None:
    from dgpp_core.api import ConfigError

    with pytest.raises(ConfigError, match=next(iter(changed))):
        make(changed, 9)


def test_sizes_of_the_checkpoints_processor_are_followed() -> None:
    small = glm_vision({"min_image_tokens": 4, "max_image_tokens": 100}, 9)
    assert small.tokens(small.canvas(56, 56, small.most_tokens)) == 4
    assert small.most_tokens == 100
    large = qwen_vision({"size": {"shortest_edge": 4096, "longest_edge": 102_400}}, 9)
    assert large.tokens(large.canvas(64, 64, large.most_tokens)) == 4
    assert large.most_tokens == 100


def test_a_picture_survives_the_way_to_the_engine() -> None:
    picture = lay_out(noise(64, 64), FAMILIES["glm"][0], 1024)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(picture), type=Picture) == picture
