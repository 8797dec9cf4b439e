"""Pieces of the OpenAPI document that every dialect's routes are described with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

ERRORS = {
    400: "The request is at fault; `param` names the field.",
    401: "The service needs an API key.",
    403: "A web page of another site asked.",
    404: "The model is not served here, or there is no such file.",
    408: "A file took too long to read.",
    413: "The body is larger than `http.max_body_bytes`, or a file than may be.",
    500: "The server is at fault.",
    503: "The server is full, stopping, or its engine has failed.",
}


def ref(name: str) -> dict[str, str]:
    """A reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


def any_of(names: Iterable[str]) -> dict[str, Any]:
    """One of several components."""
    return {"anyOf": [ref(name) for name in names]}


def generates(
    summary: str, request: str, whole: str, event: Mapping[str, Any], *, error: str = "ErrorBody"
) -> dict[str, Any]:
    """A route that answers with a ``whole`` body or a stream of ``event``."""
    content = {"application/json": {"schema": ref(whole)}, "text/event-stream": {"schema": event}}
    return _posts(summary, request, "The reply, or its stream with `stream: true`.", content, error)


def answers(summary: str, request: str, answer: str, *, error: str = "ErrorBody") -> dict[str, Any]:
    """A route that takes a body and answers at once."""
    return _posts(summary, request, summary, {"application/json": {"schema": ref(answer)}}, error)


def _posts(summary: str, request: str, answer: str, content: Mapping[str, Any], error: str) -> dict[str, Any]:
    responses = {"200": {"description": answer, "content": content}}
    body = {"required": True, "content": {"application/json": {"schema": ref(request)}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": body,
            "responses": responses | errors((400, 401, 403, 404, 408, 413, 503), error),
        }
    }


def reads(summary: str, content: Mapping[str, Any], statuses: Iterable[int] = ()) -> dict[str, Any]:
    """A route without a body; ``content`` is a schema for each media type."""
    found = {"description": summary, "content": {kind: {"schema": schema} for kind, schema in content.items()}}
    return {"get": {"summary": summary, "responses": {"200": found} | errors(statuses)}}


def errors(statuses: Iterable[int], body: str = "ErrorBody") -> dict[str, Any]:
    """The answers of ``statuses``."""
    content = {"application/json": {"schema": ref(body)}}
    return {str(status): {"description": ERRORS[status], "content": content} for status in statuses}
