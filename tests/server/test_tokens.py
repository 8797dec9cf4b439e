"""`/tokenize` and `/detokenize` against the tokenizer itself, over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import processors

USER = [{"role": "user", "content": "colors"}]


def ask(running: Any, path: str, **body: Any) -> Any:
    response = httpx.post(running.url + path, json=body, timeout=30)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("said", ["", "colors", "世界 🧑\u200d💻 안녕!\n", "<|im_start|>user"])
def test_there_and_back(fake: Any, text: Any, said: str) -> None:
    found = ask(fake, "/tokenize", model="fake", prompt=said, return_token_strs=True)
    assert found["tokens"] == text.tokenizer.encode_prompt(said)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == fake.ready.context_tokens
    assert ask(fake, "/detokenize", tokens=found["tokens"]) == {"prompt": said}


def test_a_conversation_has_the_tokens_that_chat_sends(fake: Any) -> None:
    for more in ({}, {"chat_template_kwargs": {"enable_thinking": False}}):
        fake.chat(messages=USER, **more)
        sent = fake.messages("submit")[-1]["tokens"]
        assert ask(fake, "/tokenize", messages=USER, **more)["tokens"] == sent


def test_special_tokens(serve_fake: Any, write_checkpoint: Any, tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path, (), "{% for m in messages %}{{ m.content }}{% endfor %}")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    start = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 0)])
    backend.post_processor = start
    backend.save(str(folder / "tokenizer.json"))
    with serve_fake(model=folder) as running:
        plain = ask(running, "/tokenize", prompt="colors", add_special_tokens=False)["tokens"]
        assert ask(running, "/tokenize", prompt="colors")["tokens"] == [0, *plain]
        assert ask(running, "/tokenize", messages=USER)["tokens"] == plain


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, 400, "prompt"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/tokenize", {"messages": []}, 400, "messages"),
    ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
    ("/tokenize", {"prompt": "x", "model": 5}, 400, "model"),
    ("/detokenize", {}, 400, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
    ("/detokenize", {"tokens": [10**9]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": [1.5]}, 400, "tokens[0]"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_requests(fake: Any, path: str, body: dict[str, Any], status: int, param: str) -> None:
    response = httpx.post(fake.url + path, json=body, timeout=30)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
