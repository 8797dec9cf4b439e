"""Qwen3.8-Flash-Next in its tiny form behind `dgpp serve`: images, uploads and budgets of reasoning, with drafts.

What is asked is asked by the official client.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import tokenizers
from PIL import Image

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.fake_service import EOS, MARKERS, write_checkpoint
from dgpp_core.testing.services import serve_command, started

SEEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.content is string -%}{{ message.content }}"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n<think>"
    "{%- if enable_thinking is defined and not enable_thinking -%}</think>{%- endif -%}"
)
PLAIN = {"enable_thinking": False}


def image(seed: int) -> bytes:
    file, source = io.BytesIO(), np.random.default_rng(seed)
    Image.fromarray(source.integers(0, 256, (256, 288, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("dgpp_qwen")
    model, folder = load_plugins(environ={}).model("qwen38-flash-next"), tmp_path_factory.mktemp("seeing")
    markers = (*MARKERS, *SEEN)
    write_checkpoint(folder, markers, TEMPLATE)
    token = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(SEEN[0])
    config = {**model.spec.tiny_config, "image_token_id": token}
    synthesise(model.spec, model.bindings(model.read_config(config)), config, folder, seed=4, dtype="F32")
    (folder / "chat_template.jinja").unlink()
    write_checkpoint(folder, markers, TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    line = serve_command(
        "qwen38-flash-next", "--checkpoint", str(folder), "--device", "cpu", "--model-alias", "tiny", "--mtp-depth",
        "2", "--max-concurrency", "2", "--kv-capacity", "1024", "--block-tokens", "16", "--prefix-min-tokens", "0",
    )  # fmt: skip
    with started(line, {"OMP_NUM_THREADS": "1"}) as service, connected(service.url) as found:
        yield found


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def ask(client: openai.OpenAI, *parts: Any, **fields: Any) -> Any:
    body = {"temperature": 0, "max_tokens": 6, "logprobs": True} | fields
    extra = {"ignore_eos": True} | body.pop("extra", {})
    messages: Any = [{"role": "user", "content": list(parts) or "Think."}]
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **body)


def shown(client: openai.OpenAI, **source: str) -> Any:
    parts = ({"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": source})
    return ask(client, *parts, extra={"chat_template_kwargs": PLAIN})


def logprobs(answer: Any) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


@pytest.mark.slow
def test_an_image_changes_the_reply_and_is_found_again(client: openai.OpenAI) -> None:
    first, other = shown(client, url=uri(image(1))), shown(client, url=uri(image(2)))
    assert logprobs(first)
    assert first.usage.prompt_tokens == other.usage.prompt_tokens > 64
    assert logprobs(first) != logprobs(other), "the image is seen"
    again = shown(client, url=uri(image(1)))
    assert logprobs(again) == logprobs(first)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    number = client.files.create(file=("a.png", image(1)), purpose="vision").id
    uploaded = shown(client, file_id=number)
    assert logprobs(uploaded) == logprobs(first)
    assert uploaded.usage.prompt_tokens_details.cached_tokens >= 64


@pytest.mark.slow
def test_a_text_model_refuses_images(tiny: Any) -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": uri(image(1))}}]
    with pytest.raises(openai.BadRequestError, match="takes no images") as caught:
        tiny.openai().chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])
    assert caught.value.code == "unsupported_content_type"


def reasoned(client: openai.OpenAI, budget: int | None) -> tuple[str, str, int]:
    """What is thought, what is said, and how many tokens are thought."""
    extra = {} if budget is None else {"thinking_budget": budget}
    answer = ask(client, max_tokens=14, logprobs=False, extra=extra)
    message, usage = answer.choices[0].message, answer.usage
    thought = getattr(message, "reasoning_content", None)  # of our own: the client's type does not know it
    return thought or "", message.content or "", usage.completion_tokens_details.reasoning_tokens


@pytest.mark.slow
def test_reasoning_ends_at_its_budget_and_is_the_same_until_then(client: openai.OpenAI) -> None:
    budgets = (0, 3, 8)
    free = reasoned(client, None)
    assert free[2] == 14, "this model never stops thinking by itself"
    found = [reasoned(client, budget) for budget in budgets]
    for budget, (thought, said, count) in zip(budgets, found, strict=True):
        assert count <= budget + 1  # and the token that ends it
        assert free[0].startswith(thought.rstrip("\ufffd"))
        assert said
    lengths = [len(thought) for thought, _, _ in found]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0 < lengths[-1]
    root = str(client.base_url).removesuffix("/v1/")
    assert httpx.get(root + "/metrics").json()["scheduler"]["spec_decode"]["num_draft_tokens_total"] > 0
