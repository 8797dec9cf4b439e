"""What a plugin says about how its model takes images. Nothing here imports torch.

An image goes through four hands. The front end decodes it and lays it on the model's `Canvas`; the prompt gets as many
placeholder tokens as that canvas has squares; the engine cuts the canvas into patches; the model's encoder makes a row
of each square, which takes the place of the placeholder's embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from dgpp_core.api.errors import ConfigError
from dgpp_core.api.reading import read_section, refuse, require_values

SEEN_TOKENS = 1 << 10
"""The most tokens that the service gives one image, and so the most squares that an encoder is handed."""

MOST_BLOCKS = 1024
"""Of an encoder."""

Colour = tuple[float, float, float]


class Canvas(msgspec.Struct, frozen=True, kw_only=True):
    """Where an image comes to lie, in pixels: resized to its content's size, in the top left corner of black."""

    height: int
    width: int
    content_height: int
    content_width: int


class Vision(msgspec.Struct, frozen=True, kw_only=True):
    """How a model takes images.

    Attributes:
        placeholder: id of the token that a rendered prompt has once for each image. It is repeated for every square.
        patch_size: pixels a side of what the encoder reads at once.
        merge_size: patches a side of a square; a square is one token.
        frames: frames that a patch spans; a still is the same in all of them.
        mean, std: of red, green and blue, scaled to 0 .. 1; the encoder reads ``(x - mean) / std``.
        most_tokens: the most tokens that the model takes an image in.
        canvas: from an image's height and width and the most tokens it may take to its canvas, whose sides are whole
            numbers of squares. Raises `RequestError` where the model has no canvas for such an image.
        positions: where rotary embeddings see an image's tokens. ``row``: one after the other, as any tokens.
            ``grid``: in their rows and columns, all at one time, and what follows comes after the longer side.
    """

    placeholder: int
    patch_size: int
    merge_size: int
    frames: int
    mean: Colour
    std: Colour
    most_tokens: int
    canvas: Callable[[int, int, int], Canvas]
    positions: Literal["row", "grid"] = "row"

    @property
    def square(self) -> int:
        """Pixels a side of a square."""
        return self.patch_size * self.merge_size

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares of a canvas."""
        return height // self.square, width // self.square

    def tokens(self, canvas: Canvas) -> int:
        """Tokens of an image on ``canvas``."""
        rows, columns = self.grid(canvas.height, canvas.width)
        return rows * columns


PROCESSOR = "preprocessor_config.json"


def require_processor(processor: Mapping[str, Any], only: Mapping[str, object]) -> None:
    """Members of a preprocessor_config.json that are there must have the values ``only``.

    Raises:
        ConfigError: naming the first that has another.
    """
    for name, value in only.items():
        if (found := processor.get(name, value)) != value:
            what = f"{PROCESSOR}: {name} is not supported"
            raise ConfigError(what, where=name, found=repr(found), expected=repr(value))


def processor_count(processor: Mapping[str, Any], name: str, default: int) -> int:
    """A count in a preprocessor_config.json, or ``default`` where it has none.

    Raises:
        ConfigError: it is no count.
    """
    found = processor.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int) or not 0 < found <= 1 << 40:
        raise ConfigError(f"{PROCESSOR}: {name} is no count", where=name, found=repr(found), expected="1 or more")
    return found


class EncoderSection(Protocol):
    """What every `vision_config` says."""

    @property
    def depth(self) -> int:
        """Blocks."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of a patch."""
        ...

    @property
    def num_heads(self) -> int:
        """Of a block's attention."""
        ...

    @property
    def out_hidden_size(self) -> int:
        """Width of a square's row."""
        ...


E = TypeVar("E", bound=EncoderSection)


def encoder_section(
    raw: Mapping[str, Any],
    kind: type[E],
    *,
    positive: Iterable[str],
    only: Mapping[str, object],
    width: int,
    vocab: int,
) -> tuple[E, int]:
    """`vision_config` of a config.json as the struct ``kind``, and `image_token_id`, what stands for an image.

    A head turns a quarter of its dimensions by a patch's row and one by its column, so that heads are whole multiples
    of four.

    Args:
        raw: the whole config.json, with a `vision_config`.
        positive, only: as `require_values`, of the section.
        width: of the text model's embeddings.
        vocab: the vocabulary's size.

    Raises:
        ConfigError: naming the key that is missing or not supported.
    """
    c = read_section(raw["vision_config"], kind, "an encoder of images", "vision_config")
    require_values(c, positive=("depth", "hidden_size", "num_heads", *positive), only=only, within="vision_config.")
    if c.depth > MOST_BLOCKS:
        raise refuse("vision_config.depth", c.depth, f"at most {MOST_BLOCKS}")
    if c.hidden_size % (4 * c.num_heads):
        raise refuse("vision_config.num_heads", c.num_heads, f"a divisor of {c.hidden_size} / 4")
    if c.out_hidden_size != width:
        raise refuse("vision_config.out_hidden_size", c.out_hidden_size, f"the text model's width, {width}")
    token = raw.get("image_token_id")
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
        raise refuse("image_token_id", token, "a token of the vocabulary")
    return c, token
