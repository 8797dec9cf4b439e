"""`/tokenize` and `/detokenize`: the model's tokens without the model."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from litestar import post
from litestar.types import ASGIApp

from dgpp_core.api.errors import RequestError
from dgpp_core.server.job import check_model
from dgpp_core.server.openapi_parts import answers
from dgpp_core.server.parse import parse_body, read_fields
from dgpp_core.server.prepare import chat_tokens
from dgpp_core.server.requests import ChatRequest, Effort
from dgpp_core.server.routes import Incoming, json_answer, service_of
from dgpp_core.server.served import Served


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a conversation as chat takes it; ``add_special_tokens`` is about texts."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: Annotated[list[Any], msgspec.Meta(max_length=128)] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids, and how many fit; ``token_strs`` are their texts, with U+FFFD for what is only part of a character."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ids."""

    model: str | None = None
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of ids, special tokens written out."""

    prompt: str


TOKEN_TYPES = (TokenizeRequest, Tokens, DetokenizeRequest, Detokenized)
TOKEN_PATHS = {
    "/tokenize": answers("Give the tokens of a text or a conversation.", "TokenizeRequest", "Tokens"),
    "/detokenize": answers("Give the text of tokens.", "DetokenizeRequest", "Detokenized"),
}


def tokenize_body(body: bytes, served: Served) -> Tokens:
    """The tokens that are asked for.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    request = _read(body, TokenizeRequest, served)
    tokenizer = served.text.tokenizer
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("`prompt` or `messages` is required, and not both", param="prompt")
    if request.prompt is not None:
        encode = tokenizer.encode_prompt if request.add_special_tokens else tokenizer.encode
        found = encode(request.prompt)
    else:
        chat = ChatRequest(
            model=served.options.served_id,
            messages=request.messages or [],
            tools=request.tools,
            reasoning_effort=request.reasoning_effort,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        found = chat_tokens(chat, served)
    texts = [tokenizer.decode([token], skip_special=False) for token in found] if request.return_token_strs else None
    return Tokens(count=len(found), max_model_len=served.ready.context_tokens, tokens=found, token_strs=texts)


def detokenize_body(body: bytes, served: Served) -> Detokenized:
    """The text that is asked for.

    Raises:
        RequestError: whatever is wrong with the request.
    """
    request = _read(body, DetokenizeRequest, served)
    size = served.text.tokenizer.vocab_size
    for at, token in enumerate(request.tokens):
        if not 0 <= token < size:
            raise RequestError(
                f"`tokens[{at}]`: expected an id from 0 to {size - 1}, found {token}", param=f"tokens[{at}]"
            )
    return Detokenized(prompt=served.text.tokenizer.decode(request.tokens, skip_special=False))


def _read(body: bytes, form: type[Any], served: Served) -> Any:
    raw = parse_body(body)
    if raw.get("model") is not None:
        check_model(raw, served)
    return read_fields(raw, form)


@post("/tokenize", status_code=200)
async def tokenize(request: Incoming) -> ASGIApp:
    """Give the tokens of a text or a conversation."""
    found = await service_of(request).prepare(tokenize_body, await request.body())
    return json_answer(msgspec.json.encode(found))


@post("/detokenize", status_code=200)
async def detokenize(request: Incoming) -> ASGIApp:
    """Give the text of tokens."""
    found = await service_of(request).prepare(detokenize_body, await request.body())
    return json_answer(msgspec.json.encode(found))


TOKEN_ROUTES = (tokenize, detokenize)
