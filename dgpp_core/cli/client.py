"""A small client of the chat API, on the standard library: `dgpp chat` must start at once and need nothing else."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dgpp_core.api.errors import ConfigError, DgppError, RequestError

Message = Mapping[str, str]


class Piece(msgspec.Struct, frozen=True):
    """A part of a streamed reply; ``finish`` is set on the last one."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None


class Client:
    """Talks to one service.

    Args:
        url: ``http://HOST:PORT``, with or without ``/v1``.
        timeout: seconds without a byte; the service sends keep-alive comments more often than that.
        key: the API key to show; empty for none.
    """

    def __init__(self, url: str, timeout: float = 120.0, key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError("not the address of a service", where="--url", found=url, expected="http://HOST:PORT")
        self.url, self._timeout = url, timeout
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/").removesuffix("/v1") + "/v1"

    def model(self) -> str:
        """The id of the served model."""
        with self._request("GET", "/models", None) as response:
            return str(json.loads(response.read())["data"][0]["id"])

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The whole response of a chat request."""
        with self._request("POST", "/chat/completions", body) as response:
            found: dict[str, Any] = json.loads(response.read())
            return found

    def stream(self, body: Mapping[str, Any]) -> Generator[Piece, None, None]:
        """The reply of a chat request as it comes; closing the iterator cancels the request.

        Raises:
            RequestError: the service refused it.
            DgppError: the service cannot be reached, went away or failed.
        """
        with self._request("POST", "/chat/completions", {**body, "stream": True}) as response:
            for event in _events(response):
                if event == "[DONE]":
                    return
                chunk = json.loads(event)
                if "error" in chunk:
                    raise DgppError(str(chunk["error"].get("message", "the service failed")), where=self.url)
                for choice in chunk["choices"]:
                    delta = choice["delta"]
                    text, reasoning = delta.get("content") or "", delta.get("reasoning_content") or ""
                    yield Piece(text, reasoning, choice.get("finish_reason"))
        raise self._gone("the stream ended early")

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """The response of a request; its connection closes with the block."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        payload = None if body is None else json.dumps(body).encode()
        headers = self._headers if payload is None else {"Content-Type": "application/json", **self._headers}
        try:
            connection.request(method, self._prefix + path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise _refused(response.status, response.read())
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(str(error) or type(error).__name__) from None
        finally:
            connection.close()

    def _gone(self, found: str) -> DgppError:
        hint = "start one with `dgpp serve --plugin NAME`, or name a running one with --url"
        return DgppError("the service cannot be reached", where=self.url, found=found, hint=hint)


def _refused(status: int, body: bytes) -> RequestError:
    try:
        error = json.loads(body)["error"]
        return RequestError(error["message"], status=status, param=error.get("param"), code=error.get("code"))
    except (ValueError, KeyError, TypeError):
        return RequestError(f"the service answered with status {status}", status=status)


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of each server-sent event; comments are keep-alive."""
    lines: list[str] = []
    while raw := response.readline():
        line = raw.decode().rstrip("\r\n")
        if line.startswith("data:"):
            lines.append(line[5:].removeprefix(" "))
        elif not line and lines:
            yield "\n".join(lines)
            lines = []


def request_body(model: str, messages: Sequence[Message], options: Mapping[str, Any]) -> dict[str, Any]:
    """A chat request; options that are None are left to the service."""
    return {"model": model, "messages": list(messages), **{k: v for k, v in options.items() if v is not None}}
