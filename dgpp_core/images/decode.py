"""Encoded images to pixels, with every limit checked before memory is spent.

PNG, JPEG and WebP are decoded by Pillow. Nothing that a file claims is believed: its format must be the one it is said
to have, its size is checked from its header, and a file that ends early is refused, never filled up.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from dgpp_core.api.errors import RequestError
from dgpp_core.api.vision import Vision
from dgpp_core.config.settings import ImageInputs
from dgpp_core.images.picture import Picture, picture_digest

FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WEBP"}
"""Media types that are taken, and Pillow's names of them."""
DEFAULTS = ImageInputs()


def media_type_of(data: bytes) -> str:
    """The media type of an image by how its file begins; empty where it is none that is taken."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def decode(data: bytes, media_type: str, param: str, limits: ImageInputs = DEFAULTS) -> Image.Image:
    """The image in ``data`` as RGB, what shows through composed on white. Not turned by EXIF, profiles not applied.

    Args:
        param: the request field, for errors.
        limits: on the file and its pixels.

    Raises:
        RequestError: 400 `invalid_image`.
    """
    name = FORMATS.get(media_type)
    if name is None:
        raise bad_image(param, f"the media type {media_type[:60]!r} is not supported; {', '.join(FORMATS)} are")
    if len(data) > limits.max_file_bytes:
        raise bad_image(param, f"the file has {len(data)} bytes; at most {limits.max_file_bytes} are taken")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sizes that are checked here, and of metadata that is not read
            return _decode(data, name, param, limits)
    except RequestError:
        raise
    except Image.DecompressionBombError:
        raise _too_large(param, limits) from None
    except Exception as error:  # decoders raise whatever the bytes lead them to
        what = f"this is no {name} file that can be decoded: {str(error)[:200] or type(error).__name__}"
        raise bad_image(param, what) from None


def _decode(data: bytes, name: str, param: str, limits: ImageInputs) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=(name,)) as image:
        width, height = image.size
        sides_fit = min(width, height) > 0 and max(width, height) <= limits.max_side
        if not sides_fit or width * height > limits.max_pixels:
            raise _too_large(param, limits, f"{width} x {height} pixels")
        # A JPEG may carry further pictures behind its own, as telephones add them: those are not looked at.
        if name != "JPEG" and getattr(image, "n_frames", 1) != 1:
            raise bad_image(param, "the image has several frames; send one of them")
        image.load()
        return _opaque(image)


def _opaque(image: Image.Image) -> Image.Image:
    """RGB on white."""
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        coloured = image.convert("RGBA")
        white = Image.new("RGBA", coloured.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, coloured).convert("RGB")
    return image.convert("RGB")


def lay_out(image: Image.Image, vision: Vision, most_tokens: int) -> Picture:
    """``image`` on the model's canvas: resized by antialiased bicubic interpolation, a = -0.5, in 8 bits.

    Raises:
        RequestError: the model has no canvas for it.
    """
    width, height = image.size
    canvas = vision.canvas(height, width, min(most_tokens, vision.most_tokens))
    content = (canvas.content_width, canvas.content_height)
    if image.size != content:
        image = image.resize(content, Image.Resampling.BICUBIC)
    if content != (canvas.width, canvas.height):
        board = Image.new("RGB", (canvas.width, canvas.height))
        board.paste(image)
        image = board
    rgb = image.tobytes()
    return Picture(
        height=canvas.height, width=canvas.width, rgb=rgb, tokens=vision.tokens(canvas),
        digest=picture_digest(canvas.height, canvas.width, rgb),
    )  # fmt: skip


def bad_image(param: str, what: str) -> RequestError:
    """400 for an image that cannot be used."""
    return RequestError(f"`{param}`: {what}", param=param, code="invalid_image")


def _too_large(param: str, limits: ImageInputs, found: str = "far more") -> RequestError:
    what = f"found {found}; at most {limits.max_side} a side and {limits.max_pixels} in all are taken"
    return bad_image(param, what)
