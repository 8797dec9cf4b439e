"""Whether the served model is shown images, and the places of images in its prompts."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.api.vision import Vision
from dgpp_core.config.settings import ImageInputs
from dgpp_core.images.decode import DEFAULTS
from dgpp_core.images.picture import Picture
from dgpp_core.text.stack import TextStack

log = logging.getLogger("dgpp.server")

_PROBE = "qZ7probe"
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": {}}}


class Sight(msgspec.Struct, frozen=True, eq=False):
    """What requests with images need to know.

    Attributes:
        marker: the placeholder's text, which the template writes once for an image.
        roles: whose messages may have images.
        limits: on what is taken.
        turn: whoever decodes takes a turn: a few at once, whose pixels fit into memory together.
    """

    vision: Vision
    marker: str
    roles: frozenset[str]
    limits: ImageInputs
    turn: threading.BoundedSemaphore


def sight_of(vision: Vision | None, text: TextStack, checkpoint: Path, limits: ImageInputs = DEFAULTS) -> Sight | None:
    """How images are shown to the model of ``vision``; None where it takes none, or its template shows none.

    Args:
        checkpoint: the folder of the model's files, for the log.
    """
    if vision is None or text.template is None:
        return None
    marker = text.tokenizer.decode([vision.placeholder], skip_special=False)
    if not text.tokenizer.is_added(marker):
        log.warning(
            "images are not served, and a request with one gets a 400: token %d, the placeholder of images by "
            "%s, is no added token of tokenizer.json there; take both files from one release (random checkpoints have "
            "no such token)",
            vision.placeholder, checkpoint / "config.json",
        )  # fmt: skip
        return None
    roles = frozenset(role for role in ("user", "tool") if _shows(text, role, marker))
    if not roles:
        log.warning(
            "images are not served, and a request with one gets a 400: %s: the chat template does not write %s for an "
            "image; where the release has another chat_template.jinja, put it into the checkpoint's folder",
            text.template.name, marker,
        )  # fmt: skip
        return None
    return Sight(vision, marker, roles, limits, threading.BoundedSemaphore(limits.workers))


def _shows(text: TextStack, role: str, marker: str) -> bool:
    """Whether an image in a message of ``role`` comes out as one placeholder."""
    assert text.template is not None
    before: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    if role == "tool":
        before.append({"role": "assistant", "content": "", "tool_calls": [_CALL]})
    told = {"tool_call_id": "call_1"} if role == "tool" else {}
    parts = [{"type": "text", "text": _PROBE}, {"type": "image"}]
    try:
        prompt = text.template.render([*before, {"role": role, "content": parts} | told])
    except RequestError:
        return False
    return prompt.count(marker) == 1 and prompt.index(_PROBE) < prompt.index(marker)


class Shown(msgspec.Struct, frozen=True):
    """A rendered prompt; ``places`` says which of the placeholders in it, counted from 0, stand for images."""

    text: str
    places: tuple[int, ...] = ()


Render = Callable[[Sequence[Any], Any], str]


def show(render: Render, messages: Sequence[Any], tools: Any, pictures: int, sight: Sight | None) -> Shown:
    """Render ``messages`` and ``tools``, in which there are so many images.

    Somebody may write the placeholder's text in a message. That is no image: it stays the token it always was.

    Raises:
        RequestError: what ``render`` raises; the template leaves an image out, or shows it twice.
    """
    if not pictures or sight is None:
        return Shown(render(messages, tools))
    marker, spelled = sight.marker, json.dumps([messages, tools], ensure_ascii=False)
    stand_in = "\ue000"
    if marker in spelled:
        while stand_in in spelled:
            stand_in += "\ue000"
        messages, tools = (_replaced(part, marker, stand_in) for part in (messages, tools))
    pieces = render(messages, tools).split(marker)
    if len(pieces) - 1 != pictures:
        what = f"the chat template shows {len(pieces) - 1} images of {pictures}"
        raise RequestError(what, param="messages")
    if marker not in spelled:
        return Shown(marker.join(pieces), tuple(range(pictures)))
    places, seen = [], 0
    for piece in pieces[:-1]:
        seen += piece.count(stand_in)
        places.append(seen)
        seen += 1
    return Shown(marker.join(pieces).replace(stand_in, marker), tuple(places))


def _replaced(value: Any, old: str, new: str) -> Any:
    """``value`` with ``old`` replaced by ``new`` in all its strings."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {_replaced(key, old, new): _replaced(member, old, new) for key, member in value.items()}
    return [_replaced(member, old, new) for member in value] if isinstance(value, list | tuple) else value


class Placed(msgspec.Struct, frozen=True):
    """A prompt with its pictures where they stand; ``turns`` are positions of the prompt, moved along."""

    ids: list[int]
    turns: tuple[int, ...]
    pictures: tuple[Picture, ...]


def place(
    ids: list[int], turns: tuple[int, ...], shown: Shown, pictures: Sequence[Picture], sight: Sight | None
) -> Placed:
    """Repeat each image's placeholder once for each of its tokens.

    Args:
        ids: of ``shown.text``.
    """
    if not pictures or sight is None:
        return Placed(ids, turns, ())
    token = sight.vision.placeholder
    found = [at for at, number in enumerate(ids) if number == token]
    grown: list[int] = []
    placed: list[Picture] = []
    starts, done = [], 0
    for picture, number in zip(pictures, shown.places, strict=True):
        starts.append(at := found[number])
        grown += ids[done:at]
        placed.append(msgspec.structs.replace(picture, start=len(grown)))
        grown += [token] * picture.tokens
        done = at + 1
    grown += ids[done:]
    moved = tuple(turn + sum(p.tokens - 1 for p, at in zip(placed, starts, strict=True) if at < turn) for turn in turns)
    return Placed(grown, moved, tuple(placed))
