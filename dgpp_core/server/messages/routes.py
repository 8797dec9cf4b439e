"""The routes of the dialect."""

from __future__ import annotations

import msgspec
from litestar import post
from litestar.types import ASGIApp

from dgpp_core.server.messages.bodies import message
from dgpp_core.server.messages.prepare import check_version, count_message, prepare_message
from dgpp_core.server.messages.stream import MessageStream
from dgpp_core.server.routes import Incoming, Route, generate, json_answer, service_of

MESSAGE = Route("msg_", prepare_message, MessageStream, message)
PREFIX = "/v1/messages"
"""Begins the paths whose errors are those of the dialect."""


@post(PREFIX, status_code=200)
async def messages(request: Incoming) -> ASGIApp:
    """Answer a conversation."""
    check_version(request.headers)
    return await generate(request, MESSAGE)


@post(f"{PREFIX}/count_tokens", status_code=200)
async def count_tokens(request: Incoming) -> ASGIApp:
    """Count the tokens of a conversation."""
    check_version(request.headers)
    found = await service_of(request).prepare(count_message, await request.body())
    return json_answer(msgspec.json.encode(found))


MESSAGES_ROUTES = (messages, count_tokens)
