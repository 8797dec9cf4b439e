"""The routes of the dialect."""

from __future__ import annotations

import msgspec
from litestar import post
from litestar.types import ASGIApp

from dgpp_core.server.responses.bodies import response
from dgpp_core.server.responses.prepare import count_input, prepare_response
from dgpp_core.server.responses.stream import ResponseStream
from dgpp_core.server.routes import Incoming, Route, generate, json_answer, service_of

RESPONSE = Route("resp_", prepare_response, ResponseStream, response)


@post("/v1/responses", status_code=200)
async def responses(request: Incoming) -> ASGIApp:
    """Answer a conversation."""
    return await generate(request, RESPONSE)


@post("/v1/responses/input_tokens", status_code=200)
async def input_tokens(request: Incoming) -> ASGIApp:
    """Count the tokens of a conversation."""
    found = await service_of(request).prepare(count_input, await request.body())
    return json_answer(msgspec.json.encode(found))


RESPONSES_ROUTES = (responses, input_tokens)
