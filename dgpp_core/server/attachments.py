"""Images and files out of a request's messages: what a chat template is shown in their place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.config.settings import ImageInputs
from dgpp_core.images.decode import bad_image, decode, lay_out, media_type_of
from dgpp_core.images.picture import Picture
from dgpp_core.server.data_uri import read_data_uri
from dgpp_core.server.files import Files
from dgpp_core.server.parse import convert
from dgpp_core.server.sight import Sight
from dgpp_core.text.messages import IMAGE

FILE_ROLES = ("tool", "user")
"""Whose messages may have files."""
SAME_TYPE = {"image/jpg": "image/jpeg"}
"""Media types that are no such thing and mean another."""


class ImageUrl(msgspec.Struct, frozen=True, kw_only=True):
    """An image: a data URI in `url`, or an uploaded file in `file_id`. `low` takes fewer tokens."""

    url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "high", "low"] = "auto"


class Attached(msgspec.Struct, frozen=True):
    """Messages without attachments; `IMAGE` stands for each of the pictures, in order."""

    messages: Sequence[Any]
    pictures: tuple[Picture, ...] = ()


def attach(messages: Sequence[Any], sight: Sight | None, files: Files) -> Attached:
    """Take images and files out of ``messages``, whose other members are not checked here. Files become text parts.

    Args:
        sight: of the model; None where it takes no images.

    Raises:
        RequestError: 400, 408, 413 or 503 with the path of what is wrong.
    """
    taking = _Taking(sight, files)
    found = [taking.message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    return Attached(found, tuple(taking.pictures))


class _Taking:
    """What has been taken out of a request so far."""

    def __init__(self, sight: Sight | None, files: Files) -> None:
        self._sight, self._files = sight, files
        self.pictures: list[Picture] = []
        self._pixels = self._rgb = self._data = self._text = 0

    def message(self, message: Any, path: str) -> Any:
        if not isinstance(message, Mapping) or not isinstance(content := message.get("content"), list):
            return message
        parts = [self._part(part, message.get("role"), f"{path}.content[{at}]") for at, part in enumerate(content)]
        return {**message, "content": parts}

    def _part(self, part: Any, role: Any, path: str) -> Any:
        if not isinstance(part, Mapping) or part.get("type") not in ("image_url", "file"):
            return part
        if part["type"] == "file":
            return self._file(part, role, path)
        if self._sight is None:
            raise _unsupported(path, "this model takes no images: send text alone")
        if role not in self._sight.roles:
            raise _unsupported(path, f"images belong in messages of {' and '.join(sorted(self._sight.roles))}")
        if len(self.pictures) >= (most := self._sight.limits.max_images):
            raise bad_image(path, f"a request may have {most} images")
        self.pictures.append(self._picture(part, path, self._sight))
        return IMAGE

    def _file(self, part: Mapping[str, Any], role: Any, path: str) -> dict[str, str]:
        if role not in FILE_ROLES:
            raise _unsupported(path, f"files belong in messages of {' and '.join(FILE_ROLES)}")
        path = f"{path}.file"
        file = self._files.given(part.get("file"), path)
        self._data += len(file.data)
        self._files.check_total(self._data, self._text, file.param)
        text = self._files.text(file)
        self._text += len(text.encode())
        self._files.check_total(self._data, self._text, file.param)
        return {"type": "text", "text": text}

    def _picture(self, part: Mapping[str, Any], path: str, sight: Sight) -> Picture:
        body = convert(f"{path}.image_url", part.get("image_url"), ImageUrl)
        limits = sight.limits
        data, media_type, param = self._image(body, f"{path}.image_url", limits)
        most_tokens = limits.max_tokens_low if body.detail == "low" else limits.max_tokens
        with sight.turn:
            image = decode(data, media_type, param, limits)
            self._pixels += image.width * image.height
            if self._pixels > limits.max_request_pixels:
                raise bad_image(param, f"the images of a request may have {limits.max_request_pixels} pixels together")
            try:
                picture = lay_out(image, sight.vision, most_tokens)
            except RequestError as error:
                raise bad_image(param, error.what) from None
        self._rgb += len(picture.rgb)
        if self._rgb > limits.max_request_bytes:
            what = f"the images of a request may have {limits.max_request_bytes} bytes together, resized"
            raise bad_image(param, what)
        return picture

    def _image(self, body: ImageUrl, path: str, limits: ImageInputs) -> tuple[bytes, str, str]:
        """An image's bytes, its media type, and the field that they come from."""
        if body.file_id is None:
            param = f"{path}.url"
            if body.url is None:
                raise RequestError(f"`{param}` is required", param=param, code="invalid_image")
            inline = read_data_uri(body.url, limits.max_file_bytes, param, "invalid_image")
            return inline.data, SAME_TYPE.get(inline.media_type, inline.media_type), param
        param = f"{path}.file_id"
        if body.url is not None:
            raise RequestError(f"`{param}` and `{path}.url` are two images: send one", param=param)
        _, data = self._files.kept(body.file_id, param)
        return data, media_type_of(data), param


def _unsupported(path: str, what: str) -> RequestError:
    return RequestError(f"`{path}.type`: {what}", param=f"{path}.type", code="unsupported_content_type")
