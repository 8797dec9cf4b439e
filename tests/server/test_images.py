"""Images in requests of every dialect: what reaches the engine, and what is refused by which path."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from dgpp_qwen.vision_canvas import flash_vision
from PIL import Image

from dgpp_core.api import RequestError
from dgpp_core.config.settings import FileInputs, ImageInputs
from dgpp_core.images.decode import lay_out
from dgpp_core.server.attachments import attach
from dgpp_core.server.files import Files
from dgpp_core.server.sight import sight_of
from dgpp_core.testing.fake_worker import FakeReply, FakeScript
from dgpp_core.text.stack import TextStack, load_text

PAD, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{%- if message.role == 'system' -%}{{ raise_exception('no images') }}{%- endif -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
)


def png(width: int = 320, height: int = 256, shade: int = 0) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(shade).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | fields}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


SMALL = uri(png(shade=1))
OTHER = uri(png(64, 64, shade=2))


@pytest.fixture(scope="module")
def seeing_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, write_checkpoint: Callable[[Path, Sequence[str], str], Path]
) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("seeing"), (PAD, START, END), TEMPLATE)


@pytest.fixture(scope="module")
def seeing_text(seeing_checkpoint: Path) -> TextStack:
    return load_text(seeing_checkpoint, None, config_eos=(1,))


@pytest.fixture(scope="module")
def placeholder(seeing_text: TextStack) -> int:
    found = seeing_text.tokenizer.id_of(PAD)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def seeing(serve_fake: Any, seeing_checkpoint: Path, placeholder: int) -> Iterator[Any]:
    """A front end whose model takes images."""
    script = FakeScript(replies=(FakeReply(text="Red, yellow and blue."),), context_tokens=4096)
    with serve_fake(script, model=seeing_checkpoint, vision=flash_vision({}, placeholder)) as running:
        yield running


def submitted(running: Any) -> dict[str, Any]:
    return dict(running.messages("submit")[-1])


def refused(response: httpx.Response, param: str, code: str | None, says: str = "") -> None:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    found = (error["param"], error["code"]) if "code" in error else (None, error["details"]["error_code"])
    assert found in ((param, code), (None, code)), response.text
    assert param in error["message"]
    assert says in error["message"]


def test_the_engine_gets_each_image_once_for_each_of_its_squares(seeing: Any, placeholder: int) -> None:
    answer = seeing.chat(messages=user(text("a"), part(SMALL), text("b"), part(OTHER), text("c")))
    assert answer.status_code == 200, answer.text
    sent = submitted(seeing)
    vision = flash_vision({}, placeholder)
    images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in (SMALL, OTHER)]
    wanted = [lay_out(image.convert("RGB"), vision, 1024) for image in images]
    assert [picture["tokens"] for picture in sent["pictures"]] == [80, 64]
    for picture, expected in zip(sent["pictures"], wanted, strict=True):
        assert base64.b64decode(picture["rgb"]) == expected.rgb
        assert base64.b64decode(picture["digest"]) == expected.digest
        at = range(picture["start"], picture["start"] + picture["tokens"])
        assert all(sent["tokens"][index] == placeholder for index in at)
        assert sent["tokens"][at.start - 1] != placeholder != sent["tokens"][at.stop]
    assert sent["tokens"].count(placeholder) == 144
    assert answer.json()["usage"]["prompt_tokens"] == len(sent["tokens"])


def test_detail_low_takes_a_fourth(seeing: Any) -> None:
    large = uri(png(1600, 1600, shade=3))
    counts = []
    for detail in ("high", "low"):
        assert seeing.chat(messages=user(part(large, detail=detail))).status_code == 200
        counts.append(submitted(seeing)["pictures"][0]["tokens"])
    assert counts == [1024, 256]


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP"])
def test_every_format_is_taken(seeing: Any, name: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (300, 300), (1, 2, 3)).save(file, name)
    assert seeing.chat(messages=user(part(uri(file.getvalue(), f"image/{name.lower()}")))).status_code == 200


def test_the_other_dialects_send_the_same(seeing: Any) -> None:
    seeing.chat(messages=user(text("what is this"), part(SMALL)))
    wanted = submitted(seeing)
    seeing.openai().responses.create(
        model="fake",
        input=[{"role": "user", "content": [
            {"type": "input_text", "text": "what is this"},
            {"type": "input_image", "image_url": SMALL, "detail": "original"}]}],
    )  # fmt: skip
    assert (submitted(seeing)["tokens"], submitted(seeing)["pictures"]) == (wanted["tokens"], wanted["pictures"])
    seeing.anthropic().messages.create(
        model="fake", max_tokens=20,
        messages=[{"role": "user", "content": [
            {"type": "text", "text": "what is this"},
            {"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": SMALL.partition(",")[2]}}]}],
    )  # fmt: skip
    assert (submitted(seeing)["tokens"], submitted(seeing)["pictures"]) == (wanted["tokens"], wanted["pictures"])


def test_a_tool_may_answer_with_an_image(seeing: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": SMALL.partition(",")[2]}
    messages: Any = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": source}]}]},
    ]  # fmt: skip
    seeing.anthropic().messages.create(model="fake", max_tokens=5, messages=messages)
    assert [picture["tokens"] for picture in submitted(seeing)["pictures"]] == [80]


def test_counting_counts_images(seeing: Any) -> None:
    seeing.chat(messages=user(text("hello"), part(SMALL)))
    count = len(submitted(seeing)["tokens"])
    source = {"type": "base64", "media_type": "image/png", "data": SMALL.partition(",")[2]}
    counted = seeing.anthropic().messages.count_tokens(
        model="fake", messages=[{"role": "user", "content": [text("hello"), {"type": "image", "source": source}]}]
    )
    assert counted.input_tokens == count
    body = {"messages": user(text("hello"), part(SMALL))}
    assert httpx.post(seeing.url + "/tokenize", json=body).json()["count"] == count


def test_what_somebody_writes_is_no_image(seeing: Any, placeholder: int) -> None:
    seeing.chat(messages=user(text(f"x{PAD}y"), part(OTHER), text(f"{PAD}{PAD}")))
    sent = submitted(seeing)
    (picture,) = sent["pictures"]
    own = [at for at, token in enumerate(sent["tokens"]) if token == placeholder]
    image = set(range(picture["start"], picture["start"] + picture["tokens"]))
    written = [at for at in own if at not in image]
    assert len(written) == 3
    assert written[0] < picture["start"] < written[1]
    seeing.chat(messages=user(text(f"x{PAD}y")))
    assert submitted(seeing)["pictures"] == []
    assert submitted(seeing)["tokens"].count(placeholder) == 1


def test_the_model_says_that_it_takes_images(seeing: Any, fake: Any) -> None:
    def modalities(running: Any) -> Any:
        return httpx.get(running.url + "/v1/models").json()["data"][0]["input_modalities"]

    assert modalities(seeing) == ["text", "image"]
    assert modalities(fake) == ["text"]


URL = "messages[0].content[0].image_url.url"
BAD: list[tuple[dict[str, Any], str, str | None, str]] = [
    (part("http://127.0.0.1/"), URL, "invalid_image", "data URI"),
    (part("https://example.com/a.png"), URL, "invalid_image", "data URI"),
    (part("file:///etc/passwd"), URL, "invalid_image", "data URI"),
    (part("file-abc"), URL, "invalid_image", "data URI"),
    (part(""), URL, "invalid_image", "data URI"),
    (part("data:image/png,abc"), URL, "invalid_image", "data URI"),
    (part("data:image/png;base64,"), URL, "invalid_image", "decoded"),
    (part("data:image/png;base64,!!!!"), URL, "invalid_image", "base64"),
    (part("data:image/png;base64,iVBORw0"), URL, "invalid_image", "base64"),
    (part("data:image/png;base64,AB=="), URL, "invalid_image", "canonical"),
    (part("data:image/png;base64,AAAA AAAA"), URL, "invalid_image", "base64"),
    (part(uri(b"GIF89a", "image/gif")), URL, "invalid_image", "image/gif"),
    (part(uri(b"GIF89a" + bytes(40), "image/png")), URL, "invalid_image", "PNG"),
    (part(uri(png()[:-128])), URL, "invalid_image", "decoded"),
    (part(uri(b"<svg/>", "image/svg+xml")), URL, "invalid_image", "image/svg+xml"),
    (part(uri(png(1, 300))), URL, "invalid_image", "200 times"),
    (part(SMALL, detail="best"), "messages[0].content[0].image_url.detail", None, "best"),
    ({"type": "image_url"}, "messages[0].content[0].image_url", None, "object"),
    ({"type": "image_url", "image_url": SMALL}, "messages[0].content[0].image_url", None, "object"),
    ({"type": "image_url", "image_url": {"url": 5}}, URL, None, "str"),
    ({"type": "image"}, "messages[0].content[0].type", "unsupported_content_type", "image"),
    ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type", "unsupported_content_type", "audio"),
]


@pytest.mark.parametrize(("wrong", "param", "code", "says"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_wrong_is_refused_by_its_path(
    seeing: Any, wrong: dict[str, Any], param: str, code: str | None, says: str
) -> None:
    refused(seeing.chat(messages=user(wrong)), param, code, says)
    assert seeing.chat(messages=user(part(SMALL))).status_code == 200


def test_an_uploaded_image_is_the_same_image_in_every_dialect(seeing: Any) -> None:
    data = png(shade=1)
    number = seeing.openai().files.create(file=("any.name", data), purpose="vision").id
    seeing.chat(messages=user(text("what"), part(uri(data))))
    wanted = submitted(seeing)["pictures"]
    by_id = {"type": "image_url", "image_url": {"file_id": number}}
    assert seeing.chat(messages=user(text("what"), by_id)).status_code == 200
    assert submitted(seeing)["pictures"] == wanted
    item: Any = {"role": "user", "content": [{"type": "input_text", "text": "what"},
                                             {"type": "input_image", "file_id": number}]}  # fmt: skip
    seeing.openai().responses.create(model="fake", input=[item])
    assert submitted(seeing)["pictures"] == wanted
    block = {"type": "image", "source": {"type": "file", "file_id": number}}
    turn: Any = {"role": "user", "content": [text("what"), block]}
    seeing.anthropic().messages.create(model="fake", max_tokens=5, messages=[turn])
    assert submitted(seeing)["pictures"] == wanted
    both = {"type": "image_url", "image_url": {"file_id": number, "url": SMALL}}
    refused(seeing.chat(messages=user(both)), "messages[0].content[0].image_url.file_id", None, "two images")
    plain = seeing.openai().files.create(file=("a.png", b"no image"), purpose="vision").id
    by_id = {"type": "image_url", "image_url": {"file_id": plain}}
    refused(seeing.chat(messages=user(by_id)), "messages[0].content[0].image_url.file_id", "invalid_image")


def test_paths_are_those_of_the_dialect(seeing: Any) -> None:
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]}
    found = httpx.post(seeing.url + "/v1/responses", json={"model": "fake", "input": [item]})
    refused(found, "input[0].content[1].image_url", "invalid_image")
    by_id = {"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}
    found = httpx.post(seeing.url + "/v1/responses", json={"model": "fake", "input": [by_id]})
    assert (found.status_code, found.json()["error"]["param"]) == (404, "input[0].content[0].file_id")

    def messages(source: dict[str, Any]) -> httpx.Response:
        turn = {"role": "user", "content": [text("a"), {"type": "image", "source": source}]}
        body = {"model": "fake", "max_tokens": 5, "messages": [turn]}
        return httpx.post(seeing.url + "/v1/messages", json=body)

    inline = {"type": "base64", "media_type": "image/png", "data": "AA"}
    refused(messages(inline), "messages[0].content[1].source.data", "invalid_image")
    refused(messages({"type": "url", "url": "http://127.0.0.1/"}), "messages[0].content[1].source.url", "invalid_image")


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_belong_to_those_who_may_show_them(seeing: Any, role: str) -> None:
    message = {"role": role, "content": [part(SMALL)]}
    found = seeing.chat(messages=[message, {"role": "user", "content": "x"}])
    refused(found, "messages[0].content[0].type", "unsupported_content_type", "tool and user")


def test_a_text_model_refuses_images_in_every_dialect(fake: Any) -> None:
    refused(
        fake.chat(messages=user(part(SMALL))), "messages[0].content[0].type", "unsupported_content_type", "no images"
    )
    item = {"role": "user", "content": [{"type": "input_image", "image_url": SMALL}]}
    found = httpx.post(fake.url + "/v1/responses", json={"model": "fake", "input": [item]})
    refused(found, "input[0].content[0].type", "unsupported_content_type", "no images")
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    turn = {"role": "user", "content": [block]}
    found = httpx.post(fake.url + "/v1/messages", json={"model": "fake", "max_tokens": 5, "messages": [turn]})
    refused(found, "messages[0].content[0].type", "unsupported_content_type", "no images")


LIMITS = [
    (ImageInputs(), 101, "content[100]", "100 images"),
    (ImageInputs(max_images=2), 3, "content[2]", "2 images"),
    (ImageInputs(max_request_pixels=3 * 64 * 64), 4, "content[3].image_url.url", "pixels together"),
    (ImageInputs(max_request_bytes=2 * 256 * 256 * 3), 3, "content[2].image_url.url", "bytes together"),
    (ImageInputs(max_pixels=64 * 64 - 1), 1, "content[0].image_url.url", "4095"),
    (ImageInputs(max_side=63), 1, "content[0].image_url.url", "63 a side"),
    (ImageInputs(max_file_bytes=100), 1, "content[0].image_url.url", "100 bytes"),
]


@pytest.mark.parametrize(("limits", "count", "place", "says"), LIMITS, ids=[case[2] for case in LIMITS])
def test_limits_are_settings(
    seeing_text: TextStack, placeholder: int, limits: ImageInputs, count: int, place: str, says: str
) -> None:
    sight, files = sight_of(flash_vision({}, placeholder), seeing_text, Path(), limits), Files(FileInputs())
    with pytest.raises(RequestError, match=says) as caught:
        attach(user(*[part(OTHER)] * count), sight, files)
    assert (caught.value.param, caught.value.code) == (f"messages[0].{place}", "invalid_image")
    if count > 1:
        assert len(attach(user(*[part(OTHER)] * (count - 1)), sight, files).pictures) == count - 1


def test_a_service_has_the_limits_that_it_was_given(serve_fake: Any, seeing_checkpoint: Path, placeholder: int) -> None:
    limits = ImageInputs(max_images=1, max_tokens=70, max_tokens_low=64)
    with serve_fake(model=seeing_checkpoint, vision=flash_vision({}, placeholder), images=limits) as running:
        for detail, most in (("auto", 70), ("low", 64)):
            assert running.chat(messages=user(part(SMALL, detail=detail))).status_code == 200
            assert submitted(running)["pictures"][0]["tokens"] <= most
        found = running.chat(messages=user(part(OTHER), part(OTHER)))
        refused(found, "messages[0].content[1]", "invalid_image", "1 images")


def test_a_large_image_does_not_hold_up_a_stream(serve_fake: Any, seeing_checkpoint: Path, placeholder: int) -> None:
    """While a photograph of many pixels is decoded, another client's tokens keep coming at their pace."""
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(9).integers(0, 256, (4000, 4000, 3), dtype=np.uint8)).save(file, "JPEG")
    body = json.dumps({"model": "fake", "messages": user(part(uri(file.getvalue(), "image/jpeg"))), "max_tokens": 2})
    script = FakeScript(replies=(FakeReply(text="Red " * 400),), step_ms=5)
    with serve_fake(script, model=seeing_checkpoint, vision=flash_vision({}, placeholder)) as running:
        gaps: list[float] = []
        reading = threading.Event()

        def read() -> None:
            request = {"model": "fake", "prompt": "x", "stream": True, "max_tokens": 400}
            with httpx.stream("POST", running.url + "/v1/completions", json=request, timeout=30) as stream:
                last = time.monotonic()
                for _ in stream.iter_lines():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now
                    reading.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert reading.wait(10)
        began = time.monotonic()
        answer = httpx.post(running.url + "/v1/chat/completions", content=body, timeout=30)
        took = time.monotonic() - began
        assert answer.status_code == 200, answer.text
        reader.join(30)
        assert max(gaps) < max(took / 2, 0.25), (max(gaps), took)


def test_a_template_without_images_serves_text(
    tmp_path: Path, write_checkpoint: Callable[[Path, Sequence[str], str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    plain = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"
    stack = load_text(write_checkpoint(tmp_path, (PAD, START, END), plain), None, config_eos=(1,))
    number = stack.tokenizer.id_of(PAD)
    assert number is not None
    assert sight_of(flash_vision({}, number), stack, tmp_path) is None
    assert stack.template is not None
    assert f"{stack.template.name}: the chat template does not write <|image_pad|>" in caplog.text


def test_a_placeholder_that_is_no_token_of_its_own_is_not_used(
    seeing_text: TextStack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert sight_of(None, seeing_text, tmp_path) is None
    assert not caplog.text
    assert sight_of(flash_vision({}, 70), seeing_text, tmp_path) is None
    assert f"token 70, the placeholder of images by {tmp_path / 'config.json'}, is no added token" in caplog.text


def test_turns_move_along_with_the_images_before_them(seeing: Any, seeing_text: TextStack) -> None:
    from dgpp_core.server.sight import Shown, place

    sight = sight_of(flash_vision({}, seeing_text.tokenizer.id_of(PAD) or 0), seeing_text, Path())
    assert sight is not None
    pad = sight.vision.placeholder
    pictures = [lay_out(Image.new("RGB", size), sight.vision, 1024) for size in ((64, 64), (320, 256))]
    shown = Shown("", (0, 2))
    placed = place([5, pad, 6, pad, pad, 8], (0, 1, 2, 5, 6), shown, pictures, sight)
    assert placed.ids == [5, *[pad] * 64, 6, pad, *[pad] * 80, 8]
    assert placed.turns == (0, 1, 65, 147, 148)
    assert [picture.start for picture in placed.pictures] == [1, 67]
