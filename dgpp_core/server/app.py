"""The Litestar application: routes, and every error as the OpenAI error object."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Litestar, Response, get, post
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from dgpp_core.api.errors import RequestError
from dgpp_core.server.access import OPEN, key_guard
from dgpp_core.server.answer import internal_error
from dgpp_core.server.file_routes import FILE_ROUTES
from dgpp_core.server.file_routes import PREFIX as FILES
from dgpp_core.server.job import model_not_found
from dgpp_core.server.keys import KeyRing
from dgpp_core.server.messages.bodies import message_error
from dgpp_core.server.messages.files import HEADER
from dgpp_core.server.messages.routes import MESSAGES_ROUTES
from dgpp_core.server.messages.routes import PREFIX as MESSAGES
from dgpp_core.server.metrics import OPENMETRICS_TYPE, PROMETHEUS_TYPE, json_metrics, prometheus_text
from dgpp_core.server.models import ModelList, health, model_object
from dgpp_core.server.openapi import document
from dgpp_core.server.origins import origin_guard
from dgpp_core.server.prepare import prepare_chat, prepare_completion
from dgpp_core.server.replies import chat_completion, completion, error_body
from dgpp_core.server.responses.routes import RESPONSES_ROUTES
from dgpp_core.server.routes import Incoming, Route, generate, json_answer, service_of
from dgpp_core.server.service import Service
from dgpp_core.server.sse import ChatStream, CompletionStream
from dgpp_core.server.tokens import TOKEN_ROUTES

log = logging.getLogger("dgpp.server")

CHAT = Route("chatcmpl-", prepare_chat, ChatStream, chat_completion)
COMPLETION = Route("cmpl-", prepare_completion, CompletionStream, completion)


def create_app(service: Service, *, routes: Sequence[Any] = (), keys: KeyRing | None = None) -> Litestar:
    """The application of ``service``, with further Litestar ``routes``; with ``keys``, requests must show one."""
    own = (chat, completions, list_models, get_model, get_health, get_metrics, get_openapi)
    return Litestar(
        [*own, *RESPONSES_ROUTES, *MESSAGES_ROUTES, *TOKEN_ROUTES, *FILE_ROUTES, *routes],
        state=State({"service": service}),
        guards=[origin_guard] if keys is None else [origin_guard, key_guard(keys)],
        exception_handlers={RequestError: _on_request_error, HTTPException: _on_http, Exception: _on_exception},
        request_max_body_size=service.served.options.http.max_body_bytes,
        openapi_config=None,
        logging_config=None,
    )


@post("/v1/chat/completions", status_code=200)
async def chat(request: Incoming) -> ASGIApp:
    """Answer a conversation."""
    return await generate(request, CHAT)


@post("/v1/completions", status_code=200)
async def completions(request: Incoming) -> ASGIApp:
    """Continue a text."""
    return await generate(request, COMPLETION)


@get("/v1/models")
async def list_models(request: Incoming) -> ASGIApp:
    """List what is served."""
    return json_answer(msgspec.json.encode(ModelList(data=(model_object(service_of(request).served),))))


@get("/v1/models/{model_id:path}")
async def get_model(request: Incoming) -> ASGIApp:
    """Describe the served model."""
    served = service_of(request).served
    wanted = str(request.path_params["model_id"]).removeprefix("/")
    if wanted != served.options.served_id:
        raise model_not_found(wanted, served)
    return json_answer(msgspec.json.encode(model_object(served)))


@get("/health", opt=OPEN)
async def get_health(request: Incoming) -> ASGIApp:
    """Tell whether requests can be served: 503 once the engine has failed."""
    service = service_of(request)
    found = health(service.served, service.client)
    return json_answer(msgspec.json.encode(found), status=200 if found.status == "ok" else 503)


@get(["/metrics", "/v1/metrics"])
async def get_metrics(request: Incoming) -> ASGIApp:
    """Count what happens: JSON, or the Prometheus text form where the client asks for text."""
    service = service_of(request)
    accept = request.headers.get("accept", "")
    if "openmetrics" in accept or "text/plain" in accept:
        openmetrics = "openmetrics" in accept
        media_type = OPENMETRICS_TYPE if openmetrics else PROMETHEUS_TYPE
        return ASGIResponse(body=prometheus_text(service, openmetrics=openmetrics), media_type=media_type)
    return json_answer(msgspec.json.encode(json_metrics(service)))


@get("/openapi.json", opt=OPEN)
async def get_openapi() -> ASGIApp:
    """Describe this API."""
    return json_answer(document())


def _on_request_error(request: Incoming, error: RequestError) -> Response[bytes]:
    counters = service_of(request).counters
    counters.rejected += error.status < 500
    log.info("%s %s status=%d code=%s: %s", request.method, request.scope["path"], error.status, error.code, error.what)
    headers = {"retry-after": "1"} if error.code in ("overloaded", "file_processing_busy") else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    encode = message_error if _speaks_messages(request) else error_body
    return Response(encode(error), status_code=error.status, media_type="application/json", headers=headers)


def _speaks_messages(request: Incoming) -> bool:
    """Whether errors have the form of the messages dialect: its routes, and files where its clients ask."""
    path = str(request.scope["path"])
    return path.startswith(MESSAGES) or (path.startswith(FILES) and HEADER in request.headers)


def _on_http(request: Incoming, error: HTTPException) -> Response[bytes]:
    status, path = error.status_code, request.scope["path"]
    if status == 404:
        found = RequestError(f"there is no {request.method} {path}", status=404)
    elif status == 405:
        found = RequestError(f"{path} does not take {request.method}", status=405)
    elif status == 413:
        limit = service_of(request).served.options.http.max_body_bytes
        found = RequestError(
            f"the request body is larger than http.max_body_bytes ({limit})", status=413, code="request_too_large"
        )
    else:
        found = RequestError(str(error.detail), status=status)
    return _on_request_error(request, found)


def _on_exception(request: Incoming, error: Exception) -> Response[bytes]:
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return _on_request_error(request, internal_error())
