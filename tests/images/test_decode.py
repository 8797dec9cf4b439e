"""Encoded images: what is taken, what is refused, and what is never spent on them."""

import contextlib
import io
import resource
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dgpp_core.api import RequestError
from dgpp_core.images.decode import DEFAULTS, FORMATS, decode

NOISE = np.random.default_rng(1).integers(0, 256, (120, 90, 3), dtype=np.uint8)


def encoded(image: Image.Image, name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def refusal(data: bytes, media_type: str) -> str:
    with pytest.raises(RequestError) as caught:
        decode(data, media_type, "messages[0].content[1].image_url.url")
    error = caught.value
    assert (error.status, error.code) == (400, "invalid_image")
    assert error.param == "messages[0].content[1].image_url.url"
    assert error.what.startswith("`messages[0].content[1].image_url.url`: ")
    return error.what


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_claiming(width: int, height: int) -> bytes:
    """A PNG of one black row at most, whatever its header says."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1 + 3 * min(width, 70_000)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


LOSSLESS: dict[str, Callable[[], bytes]] = {
    "image/png": lambda: encoded(Image.fromarray(NOISE), "PNG"),
    "image/webp": lambda: encoded(Image.fromarray(NOISE), "WEBP", lossless=True),
}
WHOLE = LOSSLESS | {"image/jpeg": lambda: encoded(Image.fromarray(NOISE), "JPEG", quality=95)}


@pytest.mark.parametrize("media_type", LOSSLESS)
def test_pixels_come_out_as_they_went_in(media_type: str) -> None:
    found = decode(LOSSLESS[media_type](), media_type, "x")
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), NOISE)


def test_a_jpeg_is_close_to_what_went_in() -> None:
    smooth = np.add.outer(np.arange(120), np.arange(90)).astype(np.uint8)
    data = encoded(Image.fromarray(smooth), "JPEG", quality=95)
    found = np.asarray(decode(data, "image/jpeg", "x")).astype(int)
    assert np.abs(found - smooth[..., None]).max() <= 4


@pytest.mark.parametrize("media_type", WHOLE)
@pytest.mark.parametrize("lost", [128, "half", "all"])
def test_a_file_that_ends_early_is_refused(media_type: str, lost: int | str) -> None:
    data = WHOLE[media_type]()
    kept = {"half": len(data) // 2, "all": 0}[lost] if isinstance(lost, str) else len(data) - lost
    assert "decoded" in refusal(data[:kept], media_type)


@pytest.mark.parametrize("said", FORMATS)
@pytest.mark.parametrize("true", WHOLE)
def test_a_file_of_another_format_than_it_is_said_to_have(said: str, true: str) -> None:
    if said == true:
        decode(WHOLE[true](), said, "x")
    else:
        refusal(WHOLE[true](), said)


def test_other_formats_are_not_decoded_whatever_they_are_called() -> None:
    gif, bmp = (encoded(Image.fromarray(NOISE), name) for name in ("GIF", "BMP"))
    for data in (gif, bmp, b"<svg/>", b"%PDF-1.7", b"\x00" * 64, b""):
        for media_type in FORMATS:
            refusal(data, media_type)
    assert "image/gif" in refusal(gif, "image/gif")


@pytest.mark.parametrize(("width", "height"), [(65_535, 65_535), (16_385, 1), (1, 16_385), (8192, 4097), (0, 1)])
def test_a_size_too_large_is_refused_by_its_header(width: int, height: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(png_claiming(width, height), "image/png")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


def test_a_webp_bomb_is_refused_without_its_memory() -> None:
    data = bytearray(encoded(Image.new("RGB", (1, 1)), "WEBP", lossless=True))
    at = data.index(b"VP8L") + 9
    data[at : at + 4] = struct.pack("<I", 16_382 | 16_382 << 14)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refusal(bytes(data), "image/webp")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_a_file_too_large_is_not_opened() -> None:
    assert str(DEFAULTS.max_file_bytes) in refusal(WHOLE["image/png"]() + bytes(DEFAULTS.max_file_bytes), "image/png")


@pytest.mark.parametrize("name", ["PNG", "WEBP"])
def test_frames_are_refused(name: str) -> None:
    pictures = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 200)]
    data = encoded(pictures[0], name, save_all=True, append_images=pictures[1:], duration=100)
    assert "frames" in refusal(data, f"image/{name.lower()}")


def test_pictures_behind_a_jpeg_are_passed_over() -> None:
    pictures = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (0, 200)]
    data = encoded(pictures[0], "MPO", save_all=True, append_images=pictures[1:])
    assert np.asarray(decode(data, "image/jpeg", "x"))[0, 0, 0] < 8


@pytest.mark.parametrize("media_type", LOSSLESS)
def test_what_shows_through_shows_white(media_type: str) -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 255, 128))
    name = FORMATS[media_type]
    found = decode(
        encoded(image, name, **({"lossless": True, "exact": True} if name == "WEBP" else {})), media_type, "x"
    )
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((1, 0)) == (127, 127, 255)


def test_a_palette_with_a_clear_colour_shows_white() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    found = decode(encoded(image, "PNG", transparency=0), "image/png", "x")
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 50)]


def test_grey_of_16_bits_keeps_its_shades() -> None:
    shades = np.array([[0, 255, 256, 32_768, 65_535]], dtype=np.uint16)
    found = decode(encoded(Image.fromarray(shades), "PNG"), "image/png", "x")
    assert np.asarray(found)[0, :, 0].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("mode", ["1", "L", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode)
    name = "JPEG" if mode == "CMYK" else "PNG"
    found = decode(encoded(image, name), f"image/{name.lower()}", "x")
    assert found.mode == "RGB"
    assert found.getpixel((3, 3)) == (255, 255, 255)


def test_exif_does_not_turn_the_image() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encoded(Image.fromarray(NOISE), "JPEG", exif=exif), "image/jpeg", "x").size == (90, 120)


def test_damaged_files_are_refused_or_decoded_and_nothing_else() -> None:
    source = np.random.default_rng(3)
    for media_type, make in WHOLE.items():
        data = make()
        for _ in range(150):
            bad = bytearray(data)
            for at in source.integers(0, len(bad), source.integers(1, 6)):
                bad[at] = source.integers(0, 256)
            with contextlib.suppress(RequestError):
                assert decode(bytes(bad), media_type, "x").mode == "RGB"
