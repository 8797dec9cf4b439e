"""Images of Qwen3.8-Flash-Next against transformers: the encoder, prompts with images, and every way to run them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dgpp_qwen.flash_next.vision import axes
from dgpp_qwen.vision_canvas import flash_vision
from torch import Tensor

from dgpp_core.api import ConfigError
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.images.patches import patches
from dgpp_core.images.picture import Picture
from dgpp_core.testing import ImageConformance, images
from dgpp_core.testing.world import Reply, World

PAD = 500
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "patch_size": 16, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 64, "num_position_embeddings": 16,
}  # fmt: skip
Release = Callable[[str], tuple[Any, Path]]


def picture(seed: int, size: tuple[int, int]) -> Picture:
    return images.picture(seed, size, flash_vision({}, PAD))


def prompt(pictures: Sequence[Picture]) -> tuple[list[int], tuple[Picture, ...]]:
    return images.prompt(pictures, flash_vision({}, PAD))


@pytest.fixture(scope="module")
def seeing(release: Release, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The class's model, and its checkpoint with the encoder that the class has anyway."""
    pair, folder = release("bf16")
    pair.model.config.image_token_id = PAD
    target = tmp_path_factory.mktemp("seeing")
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"vision_config": VISION, "image_token_id": PAD}
    (target / "config.json").write_text(json.dumps(raw))
    return pair, target


def world(folder: Path, **settings: Any) -> World:
    model = load_plugins(environ={}).model("qwen38-flash-next")
    values = {"max_concurrency": 2, "kv_capacity": 1024, "block_tokens": 16, "mtp": False, "prefix_min_tokens": 0}
    return World.from_checkpoint(model, folder, EngineSettings(**(values | settings)))


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@torch.inference_mode()
def logits_of_class(pair: Any, ids: list[int], pictures: Sequence[Picture]) -> Tensor:
    vision = flash_vision({}, PAD)
    grids = [(1, *(2 * side for side in vision.grid(image.height, image.width))) for image in pictures]
    pair.model.model.rope_deltas = None
    tokens = torch.tensor([ids])
    found: Tensor = pair.model(
        input_ids=tokens, use_cache=False, image_grid_thw=torch.tensor(grids), mm_token_type_ids=(tokens == PAD).int(),
        pixel_values=torch.cat([torch.from_numpy(patches(image, vision)) for image in pictures]),
    ).logits[0]  # fmt: skip
    return found


@pytest.mark.parametrize("size", [(256, 256), (512, 128), (96, 800), (352, 288)], ids=str)
@torch.inference_mode()
def test_rows_of_an_image(seeing: tuple[Any, Path], size: tuple[int, int]) -> None:
    pair, folder = seeing
    image, vision = picture(3, size), flash_vision({}, PAD)
    rows, columns = vision.grid(image.height, image.width)
    pixels = torch.from_numpy(patches(image, vision))
    wanted = pair.model.model.visual(pixels, grid_thw=torch.tensor([[1, 2 * rows, 2 * columns]])).pooler_output
    sight = world(folder).engine.sight
    assert sight is not None
    found = sight.rows(image)
    assert found.shape == wanted.shape
    assert relative(found, wanted) <= 1e-5
    assert relative(found[:1], wanted[1:2]) > 1e-3  # or any order would do


def test_logits_of_a_prompt_with_images_and_of_what_follows_it(seeing: tuple[Any, Path]) -> None:
    pair, folder = seeing
    ids, pictures = prompt([picture(1, (256, 256)), picture(2, (512, 128))])
    served = world(folder)
    found: list[Tensor] = []
    model = served.engine.model
    plain = model.logits
    model.logits = lambda hidden: found.append(plain(hidden)) or found[-1]  # type: ignore[method-assign,func-returns-value]
    name = served.submit(ids, 6, pictures=pictures)
    tokens = served.run()[name].tokens
    wanted = logits_of_class(pair, ids + tokens, pictures)[len(ids) - 1 : -1]
    assert relative(torch.cat(found), wanted) <= 1e-5
    assert tokens == wanted.argmax(-1).tolist()
    elsewhere = logits_of_class(pair, ids + tokens, [picture(9, (256, 256)), pictures[1]])[len(ids) - 1 : -1]
    assert relative(elsewhere, wanted) > 1e-3  # or the image would not matter


def replied(served: World, ids: list[int], pictures: Sequence[Picture], **fields: Any) -> Reply:
    name = served.submit(ids, 8, pictures=pictures, **fields)
    return served.run()[name]


class TestFlashNextImages(ImageConformance):
    """The kit's checks, on the class's weights."""

    model = "qwen38-flash-next"
    sizes = ((256, 256), (512, 128))

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, seeing: tuple[Any, Path]) -> Path:
        return seeing[1]


def test_a_model_without_its_encoder_takes_no_images(release: Release) -> None:
    served = world(release("bf16")[1])
    ids, pictures = prompt([picture(1, (256, 256))])
    assert "takes no images" in replied(served, ids, pictures).error


def test_which_position_a_frequency_follows() -> None:
    """As the released section says: 11 of time, 11 of rows, 10 of columns, in turn."""
    found = axes((11, 11, 10))
    assert found == tuple(1 if j % 3 == 1 and j < 33 else 2 if j % 3 == 2 and j < 30 else 0 for j in range(32))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"deepstack_visual_indexes": [3]}, "deepstack_visual_indexes"), ({"out_hidden_size": 32}, "out_hidden_size"),
        ({"num_position_embeddings": 15}, "num_position_embeddings"), ({"num_heads": 3}, "num_heads"),
        ({"patch_size": 14}, "patch_size"), ({"depth": 0}, "depth"), ({"depth": "x"}, "vision_config"),
        ({"depth": 1 << 20}, "depth"), ({"hidden_act": "relu"}, "hidden_act"),
    ],
)  # fmt: skip
def test_another_encoder_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    spec = load_plugins(environ={}).model("qwen38-flash-next").spec
    raw = dict(spec.tiny_config) | {"vision_config": spec.tiny_config["vision_config"] | changed}
    with pytest.raises(ConfigError) as caught:
        spec.read_config(raw)
    assert named in caught.value.where


@pytest.mark.parametrize("token", [None, -1, 512, True, "x"])
def test_a_placeholder_must_be_a_token(token: object) -> None:
    spec = load_plugins(environ={}).model("qwen38-flash-next").spec
    with pytest.raises(ConfigError, match="image_token_id"):
        spec.read_config(dict(spec.tiny_config) | {"image_token_id": token})


def test_the_released_encoder_has_its_tensors_and_bytes() -> None:
    model = load_plugins(environ={}).model("qwen38-flash-next")
    config = model.read_config(model.spec.full_config)
    found = [binding for binding in model.bindings(config).tensors if binding.name.startswith("model.visual.")]
    assert len(found) == 333
    values = sum(int(np.prod(binding.shape)) for binding in found)
    assert round(2 * values / 2**30, 3) == 0.836
    text = model.read_config(dict(model.spec.full_config) | {"language_model_only": True})
    assert not [b for b in model.bindings(text).tensors if b.name.startswith("model.visual.")]
    assert model.vision(text, {}) is None
