"""Files in requests: text as it is, PDFs by their text, each between a line with its name and one that ends it."""

from __future__ import annotations

import threading
from pathlib import PurePosixPath
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.config.settings import FileInputs
from dgpp_core.server.data_uri import is_uri, read_base64, read_data_uri
from dgpp_core.server.parse import convert
from dgpp_core.server.pdf import MAGIC, PdfReader

TEXT_ENDINGS = (
    ".txt", ".md", ".markdown", ".json", ".jsonl", ".csv", ".tsv", ".html", ".xml", ".yaml", ".yml", ".log", ".py",
    ".js", ".ts", ".tsx", ".jsx", ".c", ".cpp", ".h", ".hpp", ".rs", ".go", ".sh", ".sql", ".toml", ".ini",
)  # fmt: skip
"""How names of text files end; everything else is a PDF or no file that can be read."""
MAX_NAME_BYTES = 1024


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file; `file_data` is base64 or a data URI."""

    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class Files:
    """Reads files of requests, so many at once.

    Args:
        limits: sizes, the PDF program and its time.
    """

    def __init__(self, limits: FileInputs) -> None:
        self.limits = limits
        self._workers = threading.BoundedSemaphore(limits.workers)
        self._pdf = PdfReader(limits.pdf_command, seconds=limits.pdf_timeout_ms / 1e3, most_bytes=limits.max_text_bytes)

    def close(self) -> None:
        """End what is being read."""
        self._pdf.close()

    def data(self, raw: Any, path: str) -> tuple[str, bytes]:
        """The name and the bytes of a file; ``raw`` is the member `file` of a part, ``path`` its place.

        Raises:
            RequestError: 400 or 413 with the path of what is wrong.
        """
        body = convert(path, raw, FileBody)
        for name in ("file_id", "file_url"):
            if getattr(body, name) is not None:
                what = f"`{path}.{name}` is not supported: files are neither kept nor fetched here"
                raise RequestError(what, param=f"{path}.{name}", code="unsupported_parameter", hint="send `file_data`")
        if body.file_data is None:
            raise RequestError(f"`{path}.file_data` is required", param=f"{path}.file_data")
        name = body.filename or ""
        if len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
            what = f"`{path}.filename`: expected at most {MAX_NAME_BYTES} bytes without control characters"
            raise RequestError(what, param=f"{path}.filename")
        param, most, spelled = f"{path}.file_data", self.limits.max_file_bytes, body.file_data
        if len(spelled) // 4 * 3 > most + 1024:  # what stands before the base64 of a data URI is shorter than that
            raise _too_large(param, f"a file may have {most} bytes")
        if is_uri(spelled):
            data = read_data_uri(spelled, len(spelled), param, "invalid_file").data
        else:
            data = read_base64(spelled, len(spelled), param, "invalid_file")
        if len(data) > most:
            raise _too_large(param, f"a file may have {most} bytes")
        return name, data

    def text(self, name: str, data: bytes, path: str) -> str:
        """A file as the prompt has it.

        Raises:
            RequestError: it is no text and no PDF with text; 503 where all workers are busy.
        """
        if not self._workers.acquire(blocking=False):
            what = f"{self.limits.workers} files are being read, which is the limit (engine.file_inputs.workers)"
            hint = "try again in a moment"
            raise RequestError(what, status=503, param="file", code="file_processing_busy", hint=hint)
        try:
            found = self._pdf.text(data, f"{path}.file_data") if data.startswith(MAGIC) else _plain(name, data, path)
        finally:
            self._workers.release()
        shown = name or "document"
        return f"[document: {shown}]\n{found.strip()}\n[end of document: {shown}]\n"

    def check_total(self, data: int, text: int, path: str) -> None:
        """So many bytes of files, and of text in them, in one request.

        Raises:
            RequestError: 413.
        """
        limits = self.limits
        for found, most, kind in (
            (data, limits.max_request_bytes, "bytes"), (text, limits.max_text_bytes, "bytes of text"),
        ):  # fmt: skip
            if found > most:
                raise _too_large(f"{path}.file_data", f"the files of a request may have {most} {kind}")


def _plain(name: str, data: bytes, path: str) -> str:
    if PurePosixPath(name).suffix.lower() not in TEXT_ENDINGS:
        what = f"`{path}.filename`: expected a PDF, or a name that ends in one of {' '.join(TEXT_ENDINGS)}"
        raise RequestError(what, param=f"{path}.filename", code="invalid_file")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        what = f"`{path}.file_data`: the text is not UTF-8 at byte {error.start}"
        raise RequestError(what, param=f"{path}.file_data", code="invalid_file") from None
    if "\0" in text:
        what = f"`{path}.file_data`: a text has no NUL, found one at character {text.index(chr(0))}"
        raise RequestError(what, param=f"{path}.file_data", code="invalid_file")
    return text


def _too_large(param: str, what: str) -> RequestError:
    return RequestError(f"`{param}`: {what}", status=413, param=param, code="file_too_large")
