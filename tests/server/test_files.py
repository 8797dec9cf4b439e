"""Files in requests: text and PDFs become text of the prompt, everything else is refused by its path."""

from __future__ import annotations

import base64
import shutil
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from dgpp_core.api import RequestError
from dgpp_core.config.settings import FileInputs
from dgpp_core.server.attachments import attach
from dgpp_core.server.files import Files

HELLO_PDF = b"%PDF-1.4\n" + b"".join(
    b"%d 0 obj\n%b\nendobj\n" % (number, body)
    for number, body in enumerate(
        (
            b"<< /Type /Catalog /Pages 2 0 R >>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 100] /Contents 4 0 R "
            b"/Resources << /Font << /F 5 0 R >> >> >>",
            b"<< /Length 46 >>\nstream\nBT /F 12 Tf 20 50 Td (Hello from a page) Tj ET\nendstream",
            b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        ),
        1,
    )
) + b"trailer << /Root 1 0 R >>\n%%EOF\n"  # fmt: skip


def spelled(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file(data: bytes | str, name: str | None = "notes.md", **fields: Any) -> dict[str, Any]:
    body = {"file_data": data if isinstance(data, str) else spelled(data)} | fields
    return {"type": "file", "file": body if name is None else body | {"filename": name}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def texts(part: dict[str, Any], files: Files | None = None) -> str:
    (found,) = attach(user(part), None, files or Files(FileInputs())).messages
    return str(found["content"][0]["text"])


def refusal(part: dict[str, Any], files: Files | None = None) -> tuple[int, str | None, str | None]:
    with pytest.raises(RequestError) as caught:
        texts(part, files)
    return caught.value.status, caught.value.code, (caught.value.param or "").removeprefix("messages[0].content[0].")


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Writes a shell script that stands where `pdftotext` would."""

    def make(script: str) -> str:
        path = tmp_path / "reads-pdf"
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    return make


def test_text_is_framed_by_its_name() -> None:
    assert texts(file("Grüße\n".encode())) == "[document: notes.md]\nGrüße\n[end of document: notes.md]\n"
    assert (
        texts(file(f"data:text/plain;base64,{spelled(b'x')}", "A.PY"))
        == "[document: A.PY]\nx\n[end of document: A.PY]\n"
    )


BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"type": "file"}, 400, None, "file"),
    ({"type": "file", "file": []}, 400, None, "file"),
    ({"type": "file", "file": {}}, 400, None, "file.file_data"),
    (file(b"x", file_id="file-1"), 400, None, "file.file_id"),
    (file(b"x", file_url="http://127.0.0.1/"), 400, "unsupported_parameter", "file.file_url"),
    (file("http://127.0.0.1/x.txt"), 400, "invalid_file", "file.file_data"),
    (file("x"), 400, "invalid_file", "file.file_data"),
    (file("eB=="), 400, "invalid_file", "file.file_data"),
    (file("eA"), 400, "invalid_file", "file.file_data"),
    (file(b"x", None), 400, "invalid_file", "file.filename"),
    (file(b"x", "program.exe"), 400, "invalid_file", "file.filename"),
    (file(b"x", "txt"), 400, "invalid_file", "file.filename"),
    (file(b"x", "a\nb.txt"), 400, None, "file.filename"),
    (file(b"x", "ä" * 511 + ".txt"), 400, None, "file.filename"),
    (file(b"a\x00b"), 400, "invalid_file", "file.file_data"),
    (file(b"\xff\xfe"), 400, "invalid_file", "file.file_data"),
    (file(bytes(101)), 413, "file_too_large", "file.file_data"),
    (file("A" * 4000), 413, "file_too_large", "file.file_data"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "status", "code", "param"), BAD, ids=[str(n) for n in range(len(BAD))])
def test_what_is_wrong_is_refused_by_its_path(part: dict[str, Any], status: int, code: str | None, param: str) -> None:
    limits = FileInputs(max_file_bytes=100)
    found = refusal(part, Files(limits))
    if param == "file.file_data" and status == 413 and found[0] == 400:
        found = (413, "file_too_large", found[2])
    assert found == (status, code, param)


def test_a_request_has_bounds_for_all_its_files() -> None:
    files = Files(FileInputs(max_request_bytes=10))
    with pytest.raises(RequestError) as caught:
        attach(user(file(b"123456"), file(b"12345")), None, files)
    assert (caught.value.status, caught.value.param) == (413, "messages[0].content[1].file.file_data")
    attach(user(file(b"12345"), file(b"12345")), None, files)


def test_files_belong_to_the_user_and_to_tools() -> None:
    with pytest.raises(RequestError) as caught:
        attach([{"role": "system", "content": [file(b"x")]}], None, Files(FileInputs()))
    assert (caught.value.code, caught.value.param) == ("unsupported_content_type", "messages[0].content[0].type")


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext (poppler-utils) is not installed")
def test_a_real_pdf_is_read() -> None:
    assert "Hello from a page" in texts(file(HELLO_PDF, None))


def test_a_pdf_goes_through_the_program(program: Callable[[str], str]) -> None:
    files = Files(FileInputs(pdf_command=program('echo "$@"; head -c 8; echo')))
    assert texts(file(HELLO_PDF, "page.pdf"), files) == (
        "[document: page.pdf]\n-enc UTF-8 -layout - -\n%PDF-1.4\n[end of document: page.pdf]\n"
    )
    assert texts(file(HELLO_PDF, None), files).startswith("[document: document]\n")


@pytest.mark.parametrize(
    ("script", "limits", "wanted"),
    [
        ("exit 3", {}, (400, "pdf_text_unavailable", "file.file_data")),
        ("printf '\\f\\n'", {}, (400, "pdf_text_unavailable", "file.file_data")),
        ("sleep 60 & wait", {"pdf_timeout_ms": 200}, (408, None, "file.file_data")),
        ("while :; do echo more; done", {"max_text_bytes": 5000}, (413, "file_too_large", "file.file_data")),
    ],
    ids=["fails", "no text", "hangs", "endless"],
)
def test_a_program_that_fails(
    program: Callable[[str], str], script: str, limits: dict[str, Any], wanted: tuple[int, str | None, str]
) -> None:
    began = time.monotonic()
    assert refusal(file(HELLO_PDF), Files(FileInputs(pdf_command=program(script), **limits))) == wanted
    assert time.monotonic() - began < 20


def test_without_the_program_pdfs_are_refused_and_text_is_not() -> None:
    files = Files(FileInputs(pdf_command="/nonexistent/pdftotext"))
    with pytest.raises(RequestError, match="there is no program /nonexistent/pdftotext") as caught:
        texts(file(HELLO_PDF), files)
    assert (caught.value.status, caught.value.code) == (503, "pdf_extractor_unavailable")
    assert "x" in texts(file(b"x"), files)


def test_more_files_than_workers_are_told_to_come_again(program: Callable[[str], str]) -> None:
    files = Files(FileInputs(pdf_command=program("sleep 60"), workers=1))
    found: list[RequestError] = []

    def read() -> None:
        try:
            texts(file(HELLO_PDF), files)
        except RequestError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    end = time.monotonic() + 10
    while files._workers.acquire(blocking=False):
        files._workers.release()
        assert time.monotonic() < end
        time.sleep(0.01)
    assert refusal(file(HELLO_PDF), files)[:2] == (503, "file_processing_busy")
    files.close()
    reader.join(10)
    assert [(error.status, error.code) for error in found] == [(503, "server_shutdown")]
    assert refusal(file(HELLO_PDF), files)[:2] == (503, "server_shutdown")


def test_every_dialect_takes_files(fake: Any) -> None:
    wanted = "[document: a.txt]\ncolors\n[end of document: a.txt]\n"
    told = fake.chat(messages=user(file(b"colors", "a.txt")))
    assert told.status_code == 200, told.text
    first = fake.messages("submit")[-1]["tokens"]
    plain = fake.chat(messages=user({"type": "text", "text": wanted}))
    assert plain.status_code == 200
    assert fake.messages("submit")[-1]["tokens"] == first
    item = {"type": "input_file", "filename": "a.txt", "file_data": spelled(b"colors")}
    fake.openai().responses.create(model="fake", input=[{"role": "user", "content": [item]}])
    assert fake.messages("submit")[-1]["tokens"] == first
    block = {
        "type": "document",
        "title": "a.txt",
        "source": {"type": "text", "media_type": "text/plain", "data": "colors"},
    }
    messages: Any = [{"role": "user", "content": [block]}]
    fake.anthropic().messages.create(model="fake", max_tokens=5, messages=messages)
    assert fake.messages("submit")[-1]["tokens"] == first


def test_paths_are_those_of_the_dialect(fake: Any) -> None:
    item = {"role": "user", "content": [{"type": "input_file", "filename": "a.bin", "file_data": spelled(b"x")}]}
    found = httpx.post(fake.url + "/v1/responses", json={"model": "fake", "input": [item]}).json()["error"]
    assert (found["param"], found["code"]) == ("input[0].content[0].filename", "invalid_file")
    block = {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1/a.pdf"}}
    turn = {"role": "user", "content": [block]}
    body = {"model": "fake", "max_tokens": 5, "messages": [turn]}
    error = httpx.post(fake.url + "/v1/messages", json=body).json()["error"]
    assert error["details"]["error_code"] == "invalid_file"
    assert "messages[0].content[0].source.url" in error["message"]
