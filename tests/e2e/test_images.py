"""A tiny model that sees, on two ranks in processes of their own: images over HTTP, what they change, what is kept."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
from PIL import Image

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.fake_service import EOS, write_checkpoint
from dgpp_core.testing.services import serve_command, started

MARKERS = ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|begin_of_image|><|image|><|end_of_image|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}<|assistant|>"
)


def uri(seed: int, width: int, height: int) -> str:
    file, source = io.BytesIO(), np.random.default_rng(seed)
    Image.fromarray(source.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the service is."""
    pytest.importorskip("dgpp_glm")
    model, folder = load_plugins(environ={}).model("glm53-flash"), tmp_path_factory.mktemp("seeing")
    write_checkpoint(folder, MARKERS, TEMPLATE)
    token = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(MARKERS[0])
    config = {**model.spec.tiny_config, "eos_token_id": EOS, "image_token_id": token}
    synthesise(model.spec, model.bindings(model.read_config(config)), config, folder, seed=4, dtype="F32")
    (folder / "chat_template.jinja").unlink()
    write_checkpoint(folder, MARKERS, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    line = serve_command(
        "glm53-flash", "--checkpoint", str(folder), "--device", "cpu", "--model-alias", "tiny", "--world", "2",
        "--max-concurrency", "2", "--kv-capacity", "1024", "--block-tokens", "16", "--prefix-min-tokens", "0",
    )  # fmt: skip
    with started(line, {"OMP_NUM_THREADS": "1"}) as service:
        yield service.url


def ask(url: str, image: str, *after: dict[str, Any]) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": image}}]
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": parts}, *after], "max_tokens": 4, "temperature": 0,
        "logprobs": True, "ignore_eos": True,
    }  # fmt: skip
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.slow
def test_images_over_http(url: str) -> None:
    (listed,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    assert listed["input_modalities"] == ["text", "image"]
    first, other = ask(url, uri(1, 112, 140)), ask(url, uri(2, 112, 140))
    assert first["usage"]["prompt_tokens"] == other["usage"]["prompt_tokens"] >= 20
    assert logprobs(first) != logprobs(other), "the image is seen"
    again = ask(url, uri(1, 112, 140))
    assert logprobs(again) == logprobs(first)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    turn = ask(url, uri(1, 112, 140), said, {"role": "user", "content": "And now?"})
    assert turn["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


@pytest.mark.slow
def test_an_image_that_is_none_leaves_the_service_as_it_was(url: str) -> None:
    whole = uri(3, 112, 112)
    before = ask(url, whole)
    body = {"model": "tiny", "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": whole[:-128]}},
    ]}]}  # fmt: skip
    refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_image")
    assert logprobs(ask(url, whole)) == logprobs(before)
