"""Log lines as text or as JSON, each with the id of the HTTP request that it is about."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec

LogFormat = Literal["text", "json"]

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that the current task answers."""


class TextFormatter(logging.Formatter):
    """``time LEVEL logger: [request id] message``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The line, with the request's id before the message."""
        if request := REQUEST_ID.get():
            record.message = f"[{request}] {record.message}"
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, ``request_id``, ``error`` with a
    traceback, and the fields that the line was logged with (`fields`)."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := REQUEST_ID.get():
            line["request_id"] = request
        line |= getattr(record, _FIELDS, {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


_FIELDS = "dgpp_fields"


def fields(values: msgspec.Struct) -> dict[str, Any]:
    """What to log a line with, as ``extra``, so that its JSON form has the members of ``values``."""
    return {_FIELDS: msgspec.to_builtins(values)}


def set_up(form: LogFormat, level: str, stream: TextIO | None = None) -> None:
    """Log to ``stream``, standard error by default, from ``level`` (``debug``, ``info``, ``warn``, ``error``) on."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
