"""Files in requests: text as it is, PDFs by their text, each between a line with its name and one that ends it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.config.settings import FileInputs
from dgpp_core.server.data_uri import is_uri, read_base64, read_data_uri
from dgpp_core.server.parse import convert
from dgpp_core.server.pdf import MAGIC, PdfReader
from dgpp_core.server.store import StoredFile

TEXT_ENDINGS = (
    ".txt", ".md", ".markdown", ".json", ".jsonl", ".csv", ".tsv", ".html", ".xml", ".yaml", ".yml", ".log", ".py",
    ".js", ".ts", ".tsx", ".jsx", ".c", ".cpp", ".h", ".hpp", ".rs", ".go", ".sh", ".sql", ".toml", ".ini",
)  # fmt: skip
"""How names of text files end; everything else is a PDF or no file that can be read."""
MAX_NAME_BYTES = 1024


class FileBody(msgspec.Struct, frozen=True, kw_only=True):
    """A file: its bytes in `file_data`, base64 or a data URI, or the id of one that was uploaded in `file_id`."""

    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None


Kept = Callable[[str, str], tuple[StoredFile, bytes]]
"""An uploaded file by its id; the second argument is the field that names it. As `FileStore.read`."""


class GivenFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a request. ``param`` is the field that its bytes come from, ``name_param`` that of its name."""

    name: str
    data: bytes
    param: str
    name_param: str


class Files:
    """Reads files of requests, so many at once.

    Args:
        limits: sizes, the PDF program and its time.
        kept: uploaded files; without it, none were uploaded.
    """

    def __init__(self, limits: FileInputs, kept: Kept | None = None) -> None:
        self.limits, self._kept = limits, kept
        self._workers = threading.BoundedSemaphore(limits.workers)
        self._pdf = PdfReader(limits.pdf_command, seconds=limits.pdf_timeout_ms / 1e3, most_bytes=limits.max_text_bytes)

    def close(self) -> None:
        """End what is being read."""
        self._pdf.close()

    def given(self, raw: Any, path: str) -> GivenFile:
        """A file's name and bytes; ``raw`` is the member `file` of a part, ``path`` its place.

        Raises:
            RequestError: 400, 404 or 413 with the path of what is wrong.
        """
        body = convert(path, raw, FileBody)
        if body.file_url is not None:
            what = f"`{path}.file_url` is not supported: nothing is fetched from elsewhere"
            hint = "send `file_data`, or upload the file and send its `file_id`"
            raise RequestError(what, param=f"{path}.file_url", code="unsupported_parameter", hint=hint)
        name = body.filename or ""
        if len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
            what = f"`{path}.filename`: expected at most {MAX_NAME_BYTES} bytes without control characters"
            raise RequestError(what, param=f"{path}.filename")
        if body.file_id is not None:
            if body.file_data is not None:
                what = f"`{path}.file_id` and `{path}.file_data` are two files: send one"
                raise RequestError(what, param=f"{path}.file_id")
            kept, data = self.kept(body.file_id, f"{path}.file_id")
            param = f"{path}.file_id"
            return GivenFile(name=name or kept.filename, data=data, param=param, name_param=param)
        if body.file_data is None:
            raise RequestError(f"`{path}.file_data` or `{path}.file_id` is required", param=f"{path}.file_data")
        data = self._inline(body.file_data, f"{path}.file_data")
        return GivenFile(name=name, data=data, param=f"{path}.file_data", name_param=f"{path}.filename")

    def kept(self, number: str, param: str) -> tuple[StoredFile, bytes]:
        """A file that was uploaded.

        Raises:
            RequestError: 404 `file_not_found`.
        """
        if self._kept is None:
            raise RequestError(f"`{param}`: no files are kept here", status=404, param=param, code="file_not_found")
        return self._kept(number, param)

    def _inline(self, spelled: str, param: str) -> bytes:
        most = self.limits.max_file_bytes
        if len(spelled) // 4 * 3 > most + 1024:  # what stands before the base64 of a data URI is shorter than that
            raise file_too_large(param, f"a file may have {most} bytes")
        if is_uri(spelled):
            data = read_data_uri(spelled, len(spelled), param, "invalid_file").data
        else:
            data = read_base64(spelled, len(spelled), param, "invalid_file")
        if len(data) > most:
            raise file_too_large(param, f"a file may have {most} bytes")
        return data

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One of the workers, for as long as the block runs.

        Raises:
            RequestError: 503, all of them are busy.
        """
        if not self._workers.acquire(blocking=False):
            what = f"{self.limits.workers} files are being read, which is the limit (engine.file_inputs.workers)"
            hint = "try again in a moment"
            raise RequestError(what, status=503, param="file", code="file_processing_busy", hint=hint)
        try:
            yield
        finally:
            self._workers.release()

    def text(self, file: GivenFile) -> str:
        """A file as the prompt has it.

        Raises:
            RequestError: it is no text and no PDF with text; 503 where all workers are busy.
        """
        with self.turn():
            found = self._pdf.text(file.data, file.param) if file.data.startswith(MAGIC) else _plain(file)
        shown = file.name or "document"
        return f"[document: {shown}]\n{found.strip()}\n[end of document: {shown}]\n"

    def check_total(self, data: int, text: int, param: str) -> None:
        """So many bytes of files, and of text in them, in one request; ``param`` is the field of the last one.

        Raises:
            RequestError: 413.
        """
        limits = self.limits
        for found, most, kind in (
            (data, limits.max_request_bytes, "bytes"), (text, limits.max_text_bytes, "bytes of text"),
        ):  # fmt: skip
            if found > most:
                raise file_too_large(param, f"the files of a request may have {most} {kind}")


def _plain(file: GivenFile) -> str:
    if PurePosixPath(file.name).suffix.lower() not in TEXT_ENDINGS:
        what = f"`{file.name_param}`: expected a PDF, or a name that ends in one of {' '.join(TEXT_ENDINGS)}"
        raise RequestError(what, param=file.name_param, code="invalid_file")
    try:
        text = file.data.decode()
    except UnicodeDecodeError as error:
        what = f"`{file.param}`: the text is not UTF-8 at byte {error.start}"
        raise RequestError(what, param=file.param, code="invalid_file") from None
    if "\0" in text:
        what = f"`{file.param}`: a text has no NUL, found one at character {text.index(chr(0))}"
        raise RequestError(what, param=file.param, code="invalid_file")
    return text


def file_too_large(param: str, what: str) -> RequestError:
    """413 for a file, or files, of more bytes than may be."""
    return RequestError(f"`{param}`: {what}", status=413, param=param, code="file_too_large")
