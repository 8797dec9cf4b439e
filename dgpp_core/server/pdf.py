"""The text of a PDF, by a program of its own that is bounded in time and output, and ended with the service."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading

from dgpp_core.api.errors import RequestError
from dgpp_core.host.child import program_command

MAGIC = b"%PDF-"


class PdfReader:
    """Runs ``command -enc UTF-8 -layout - -``, as `pdftotext` of Poppler and of Xpdf takes it.

    Args:
        command: the program.
        seconds: it may take.
        most_bytes: of text that it may write.
    """

    def __init__(self, command: str, *, seconds: float, most_bytes: int) -> None:
        self._command, self._seconds, self._most_bytes = command, seconds, most_bytes
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def text(self, data: bytes, param: str) -> str:
        """The text in ``data``.

        Raises:
            RequestError: 400 `pdf_text_unavailable`, 408, 413 `file_too_large`, or 503.
        """
        with tempfile.TemporaryFile() as file:
            file.write(data)
            file.seek(0)
            process = self._start(file.fileno())
            late = threading.Event()

            def give_up() -> None:
                late.set()
                _kill(process)

            timer = threading.Timer(self._seconds, give_up)
            timer.start()
            assert process.stdout is not None
            try:
                with process.stdout as output:
                    written = output.read(self._most_bytes + 1)
            finally:
                timer.cancel()
                _kill(process)
                status = process.wait()
                with self._lock:
                    self._running.discard(process)
        if self._closed:
            raise RequestError("the server is shutting down", status=503, code="server_shutdown")
        if late.is_set():
            raise RequestError(
                f"`{param}`: the PDF took longer than {self._seconds:g} s to read", status=408, param=param
            )
        return self._checked(written, status, param)

    def _start(self, stdin: int) -> subprocess.Popen[bytes]:
        if shutil.which(self._command) is None:
            what = f"PDFs cannot be read here: there is no program {self._command}"
            hint = "install poppler-utils, name another program in engine.file_inputs.pdf_command, or send text"
            raise RequestError(what, status=503, param="file", code="pdf_extractor_unavailable", hint=hint)
        with self._lock:
            if self._closed:
                raise RequestError("the server is shutting down", status=503, code="server_shutdown")
            process = subprocess.Popen(
                program_command(self._command, "-enc", "UTF-8", "-layout", "-", "-"),
                stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
            return process

    def _checked(self, written: bytes, status: int, param: str) -> str:
        if len(written) > self._most_bytes:
            what = f"`{param}`: the PDF has more than {self._most_bytes} bytes of text"
            raise RequestError(what, status=413, param=param, code="file_too_large")
        text = written.decode("utf-8", "replace")
        if not text.strip("\f\n\r\t "):
            what = f"`{param}`: the PDF has no text that can be read" + f" (status {status})" * (status > 0)
            raise RequestError(what, param=param, code="pdf_text_unavailable", hint="send text, or the pages as images")
        return text

    def close(self) -> None:
        """End what runs; whoever waits for it is told that the server stops."""
        with self._lock:
            self._closed = True
            running = tuple(self._running)
        for process in running:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
