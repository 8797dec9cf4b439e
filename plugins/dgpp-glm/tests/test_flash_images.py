"""Images of GLM-5.3-Flash against transformers: the encoder, prompts with images, and every way to run them."""

import copy
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from dgpp_glm.glm53_flash.specs import FULL, TINY
from dgpp_glm.vision_canvas import flash_vision
from safetensors.torch import load_file, save_file
from torch import Tensor

from dgpp_core.api import ConfigError
from dgpp_core.config.settings import EngineSettings
from dgpp_core.host.loading import load_plugins
from dgpp_core.images.patches import patches
from dgpp_core.images.picture import Picture
from dgpp_core.testing import ImageConformance, images
from dgpp_core.testing.fake_service import write_checkpoint
from dgpp_core.testing.float64 import Float64, float64
from dgpp_core.testing.tensor_parallel import TensorParallelWorld
from dgpp_core.testing.world import Reply, World
from dgpp_core.text.stack import load_text

_SPEC = importlib.util.spec_from_file_location("flash_parity", Path(__file__).with_name("test_flash_parity.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
parity = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(parity)

PAD, REPLY = 500, 4
VISION = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 14, "temporal_patch_size": 2,
    "spatial_merge_size": 2, "in_channels": 3, "out_hidden_size": 128, "projection_intermediate_size": 96,
    "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-5, "swiglu_limit": 0.4,
}  # fmt: skip
CANVAS = flash_vision({}, PAD)
Seeing = tuple[Any, Path]


def picture(seed: int, size: tuple[int, int]) -> Picture:
    return images.picture(seed, size, CANVAS)


def prompt(pictures: Sequence[Picture]) -> tuple[list[int], tuple[Picture, ...]]:
    return images.prompt(pictures, CANVAS)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """The class's model with its encoder, and its checkpoint."""
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig

    pair, folder = parity.Pair(21), tmp_path_factory.mktemp("seeing")
    parity.write_release(pair, folder, "bf16")
    config = Glm5NextConfig(text_config=parity.TEXT | parity.LINEAR, vision_config=VISION, image_token_id=PAD)
    config._attn_implementation = "eager"
    model = modeling.Glm5NextForConditionalGeneration(config).eval()
    model.model.language_model, model.lm_head = pair.model, pair.head
    source, tensors = torch.Generator().manual_seed(8), load_file(folder / "model.safetensors")
    with torch.no_grad():
        for name, weight in model.model.visual.state_dict().items():
            scale, mean = (0.2, "norm" in name and name.endswith("weight")) if weight.dim() == 1 else (1, 0)
            fan = 1 if weight.dim() == 1 else weight[0].numel()
            weight.copy_((mean + scale * fan**-0.5 * torch.randn(weight.shape, generator=source)).bfloat16())
            tensors[f"model.visual.{name}"] = weight.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"vision_config": VISION | {"block_norm_eps": 1e-5}, "image_token_id": PAD}
    (folder / "config.json").write_text(json.dumps(raw))
    return model, folder


SETTINGS = EngineSettings(max_concurrency=2, kv_capacity=512, block_tokens=16, mtp=False, prefix_min_tokens=0)


def world(folder: Path, **settings: Any) -> World:
    chosen = msgspec.structs.replace(SETTINGS, **settings)
    return World.from_checkpoint(load_plugins(environ={}).model("glm53-flash"), folder, chosen)


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def rows_of(folder: Path, image: Picture) -> Tensor:
    sight = world(folder).engine.sight
    assert sight is not None
    return sight.rows(image)


@torch.inference_mode()
def rows_of_class(visual: Any, image: Picture) -> Tensor:
    grid = torch.tensor([[1, *(2 * side for side in CANVAS.grid(image.height, image.width))]])
    pixels = torch.from_numpy(patches(image, CANVAS)).double()
    with Float64():
        found: Tensor = float64(visual)(pixels, grid_thw=grid).pooler_output
    return found


@torch.inference_mode()
def logits_of_class(model: Any, ids: list[int], pictures: Sequence[Picture]) -> Tensor:
    grids = [(1, *(2 * side for side in CANVAS.grid(image.height, image.width))) for image in pictures]
    tokens = torch.tensor([ids])
    pixels = torch.cat([torch.from_numpy(patches(image, CANVAS)) for image in pictures]).double()
    with Float64():
        found: Tensor = float64(model)(
            input_ids=tokens, use_cache=False, image_grid_thw=torch.tensor(grids), pixel_values=pixels,
            mm_token_type_ids=(tokens == PAD).int(),
        ).logits[0]  # fmt: skip
    return found


@pytest.mark.parametrize("size", [(112, 112), (300, 50), (28, 448), (200, 170)], ids=str)
def test_rows_of_an_image(seeing: Seeing, size: tuple[int, int]) -> None:
    model, folder = seeing
    image = picture(3, size)
    wanted, found = rows_of_class(model.model.visual, image), rows_of(folder, image)
    assert found.shape == wanted.shape == (image.tokens, 128)
    assert relative(found, wanted) <= 1e-5
    assert relative(found.roll(1, 0), wanted) > 1e-3  # or any order would do


@pytest.mark.parametrize(
    ("changed", "least"),
    [({"swiglu_limit": 0.5}, 1e-3), ({"rms_norm_eps": 1e-2}, 1e-4), ({"block_norm_eps": 1e-2}, 1e-4)],
)
def test_what_the_rows_depend_on(seeing: Seeing, tmp_path: Path, changed: dict[str, Any], least: float) -> None:
    """Each constant of the config counts, or its parity would say nothing."""
    model, folder = seeing
    other = with_vision(folder, tmp_path, VISION | {"block_norm_eps": 1e-5} | changed)
    image = picture(3, (112, 112))
    assert relative(rows_of(other, image), rows_of_class(model.model.visual, image)) > least


def with_vision(folder: Path, target: Path, vision: dict[str, Any] | None) -> Path:
    """The checkpoint with something else said about its encoder."""
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"vision_config": vision}
    (target / "config.json").write_text(json.dumps(raw))
    return target


def test_norms_before_sublayers_have_the_epsilon_of_the_training(seeing: Seeing, tmp_path: Path) -> None:
    """Where a config says nothing of it: in front of streams so small that it counts."""
    model, folder = seeing
    visual, image = copy.deepcopy(model.model.visual), picture(4, (112, 112))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in visual.patch_embed.proj.named_parameters():
        weight.data *= 2.0**-9
        tensors[f"model.visual.patch_embed.proj.{name}"] *= 2.0**-9
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text()) | {"vision_config": VISION}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = rows_of(tmp_path, image)
    assert relative(found, rows_of_class(visual, image)) > 1e-2
    for block in visual.blocks:
        block.norm1.variance_epsilon = block.norm2.variance_epsilon = 1e-6
    assert relative(found, rows_of_class(visual, image)) <= 1e-5


def test_logits_of_a_prompt_with_images_and_of_what_follows_it(seeing: Seeing) -> None:
    model, folder = seeing
    ids, pictures = prompt([picture(1, (112, 112)), picture(2, (130, 90))])
    served, found = world(folder), list[Tensor]()
    target: Any = served.engine.model
    plain = target.logits
    target.logits = lambda hidden: found.append(plain(hidden)) or found[-1]  # type: ignore[func-returns-value]
    tokens = replied(served, ids, pictures).tokens
    wanted = logits_of_class(model, ids + tokens, pictures)[len(ids) - 1 : -1]
    # These weights' third layer makes an error five times as large; the class itself is 1.2e-5 off in float32.
    assert relative(torch.cat(found), wanted) <= 1.1e-5
    assert tokens == wanted.argmax(-1).tolist()
    elsewhere = logits_of_class(model, ids + tokens, [picture(9, (112, 112)), pictures[1]])[len(ids) - 1 : -1]
    assert relative(elsewhere, wanted) > 1e-3  # or the image would not matter


def replied(served: World, ids: list[int], pictures: Sequence[Picture], **fields: Any) -> Reply:
    name = served.submit(ids, REPLY, pictures=pictures, **fields)
    return served.run()[name]


class TestFlashImages(ImageConformance):
    """The kit's checks, on the class's weights."""

    model = "glm53-flash"

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, seeing: Seeing) -> Path:
        return seeing[1]


def test_ranks_take_what_the_first_one_saw(seeing: Seeing) -> None:
    """Two ranks reply as one does, and go on together where the second one's encoder is a bit off."""
    _, folder = seeing
    ids, pictures = prompt([picture(1, (112, 112))])
    wanted = replied(world(folder), ids, pictures).tokens
    model = load_plugins(environ={}).model("glm53-flash")
    ranks = TensorParallelWorld.load(model, folder, SETTINGS, 2)
    assert replied(ranks, ids, pictures).tokens == wanted
    second: Any = ranks.ranks[1].engine.model
    encoder = second.encoder
    second.encoder = lambda *given: encoder(*given) * 1.5
    ids, pictures = prompt([picture(5, (112, 112))])
    assert replied(ranks, ids, pictures).tokens == replied(world(folder), ids, pictures).tokens


def test_a_checkpoint_without_a_vision_config_takes_no_images(seeing: Seeing, tmp_path: Path) -> None:
    served = world(with_vision(seeing[1], tmp_path, None))
    ids, pictures = prompt([picture(1, (112, 112))])
    assert "takes no images" in replied(served, ids, pictures).error
    assert len(replied(served, ids, ()).tokens) == REPLY


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"attention_bias": False}, "attention_bias"), ({"out_hidden_size": 32}, "out_hidden_size"),
        ({"num_heads": 3}, "num_heads"), ({"patch_size": 16}, "patch_size"), ({"depth": 0}, "depth"),
        ({"depth": "x"}, "vision_config"), ({"depth": 1 << 20}, "depth"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": -1.0}, "swiglu_limit"), ({"block_norm_eps": 0.0}, "block_norm_eps"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 5e5}}, "rope_parameters.rope_theta"),
    ],
)  # fmt: skip
def test_another_encoder_is_refused_by_name(changed: dict[str, Any], named: str) -> None:
    spec = load_plugins(environ={}).model("glm53-flash").spec
    with pytest.raises(ConfigError) as caught:
        spec.read_config(TINY | {"vision_config": TINY["vision_config"] | changed})
    assert named in caught.value.where


@pytest.mark.parametrize("token", [None, -1, 512, True, "x"])
def test_a_placeholder_must_be_a_token(token: object) -> None:
    spec = load_plugins(environ={}).model("glm53-flash").spec
    with pytest.raises(ConfigError, match="image_token_id"):
        spec.read_config(TINY | {"image_token_id": token})


def test_the_plan_counts_images_and_only_where_there_are_any() -> None:
    model = load_plugins(environ={}).model("glm53-flash")
    terms = {term.name: term for term in model.plan_terms(model.read_config(FULL), 1, {})}
    assert {name: round(term.bytes / 2**20) for name, term in terms.items()} == {
        "images seen": 256,
        "an image being encoded": 517,
    }
    assert not any(term.exact for term in terms.values())
    text = model.read_config({key: value for key, value in FULL.items() if key != "vision_config"})
    assert model.plan_terms(text, 1, {}) == ()
    assert model.vision(text, {}) is None


def test_the_released_template_writes_one_placeholder_for_an_image(tmp_path: Path) -> None:
    """Between its marks, in messages of users and in results of tools: where the front end looks for it."""
    path = Path(__file__).parents[4] / "shared" / "data" / "chat_templates" / "GLM-5.3-Flash.jinja"
    if not path.is_file():
        pytest.skip(f"no recorded template at {path}")
    write_checkpoint(tmp_path, ("<|image|>",), path.read_text(encoding="utf-8"))
    template = load_text(tmp_path, None, config_eos=(1,)).template
    assert template is not None
    parts: list[dict[str, str]] = [{"type": "text", "text": "Look:"}, {"type": "image"}]
    shown = "Look:<|begin_of_image|><|image|><|end_of_image|>"
    assert f"<|user|>{shown}" in template.render([{"role": "user", "content": parts}])
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}
    asked: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    answered = template.render([*asked, {"role": "tool", "content": parts, "tool_call_id": "call_1"}])
    assert f"<tool_response>{shown}</tool_response>" in answered
