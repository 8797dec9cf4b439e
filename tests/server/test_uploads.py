"""`/v1/files`: uploads through the official client, in every dialect, across restarts, damage and full stores."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from click.testing import CliRunner

from dgpp_core.api import ConfigError, RequestError
from dgpp_core.cli.main import cli
from dgpp_core.config.settings import FileInputs, HttpSettings
from dgpp_core.server.store import ABOUT, CONTENT, LEAST_CHARGE, FileStore
from dgpp_core.server.uploads import Upload, read_upload

NOTES = "Grüße\n".encode()
UNKNOWN = "file-" + 32 * "0"


def kept_in(folder: Path, **limits: Any) -> FileStore:
    return FileStore(FileInputs(directory=str(folder), **limits), os.urandom)


def fault(call: Callable[[], object]) -> tuple[int, str | None]:
    with pytest.raises(RequestError) as caught:
        call()
    return caught.value.status, caught.value.code


def error_of(call: Callable[[], object]) -> RequestError | None:
    try:
        call()
    except RequestError as error:
        return error
    return None


def test_the_official_client_keeps_lists_reads_and_deletes(fake: Any) -> None:
    files = fake.openai().files
    sent = files.create(file=("notes.md", NOTES), purpose="user_data")
    assert (sent.object, sent.filename, sent.bytes, sent.purpose) == ("file", "notes.md", len(NOTES), "user_data")
    assert sent.status == "processed"
    assert files.retrieve(sent.id) == sent
    assert sent in files.list().data
    assert files.content(sent.id).read() == NOTES
    headers = httpx.get(f"{fake.url}/v1/files/{sent.id}/content").headers
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"] == "attachment"
    assert files.delete(sent.id).deleted
    assert sent not in files.list().data
    for call in (files.retrieve, files.content, files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(sent.id)
        assert (caught.value.code, caught.value.param) == ("file_not_found", "file_id")


def test_the_other_official_client_keeps_lists_reads_and_deletes(fake: Any) -> None:
    client = fake.anthropic()
    files = client.beta.files
    before = {kept.id for kept in files.list()}
    sent = files.upload(file=("notes.md", NOTES, "text/markdown"))
    assert (sent.type, sent.filename, sent.size_bytes, sent.mime_type) == (
        "file",
        "notes.md",
        len(NOTES),
        "text/markdown",
    )
    assert sent.downloadable
    assert abs(sent.created_at.timestamp() - time.time()) < 60
    assert files.retrieve_metadata(sent.id) == sent
    page = files.list()
    assert {kept.id for kept in page} == before | {sent.id}
    assert (page.last_id, page.has_more) == (sent.id, False)
    assert files.download(sent.id).read() == NOTES
    assert fake.openai().files.retrieve(sent.id).purpose == "user_data"
    turn: Any = {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": sent.id}}]}
    client.beta.messages.create(model="fake", max_tokens=5, messages=[turn], betas=["files-api-2025-04-14"])
    assert files.delete(sent.id).type == "file_deleted"
    for call in (files.retrieve_metadata, files.download, files.delete):
        with pytest.raises(anthropic.NotFoundError) as caught:
            call(sent.id)
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
        files.upload(file=("notes.md", NOTES), expires_in_seconds=3600)


def test_every_dialect_takes_the_id_of_a_file(fake: Any) -> None:
    """The prompt is the one that the file's bytes in the request give."""
    number = fake.openai().files.create(file=("a.txt", b"colors"), purpose="assistants").id
    fake.chat(messages=[{"role": "user", "content": "[document: a.txt]\ncolors\n[end of document: a.txt]\n"}])
    wanted = fake.messages("submit")[-1]["tokens"]
    part = {"type": "file", "file": {"file_id": number}}
    assert fake.chat(messages=[{"role": "user", "content": [part]}]).status_code == 200
    assert fake.messages("submit")[-1]["tokens"] == wanted
    item: Any = {"role": "user", "content": [{"type": "input_file", "file_id": number}]}
    fake.openai().responses.create(model="fake", input=[item])
    assert fake.messages("submit")[-1]["tokens"] == wanted
    turn: Any = {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": number}}]}
    fake.anthropic().messages.create(model="fake", max_tokens=5, messages=[turn])
    assert fake.messages("submit")[-1]["tokens"] == wanted


def test_an_id_of_no_file_is_named_by_the_path_of_the_dialect(fake: Any) -> None:
    part = {"type": "file", "file": {"file_id": UNKNOWN}}
    found = fake.chat(messages=[{"role": "user", "content": [part]}])
    error = found.json()["error"]
    assert (found.status_code, error["code"]) == (404, "file_not_found")
    assert error["param"] == "messages[0].content[0].file.file_id"
    item: Any = {"role": "user", "content": [{"type": "input_file", "file_id": "../../etc/passwd"}]}
    with pytest.raises(openai.NotFoundError) as caught:
        fake.openai().responses.create(model="fake", input=[item])
    assert caught.value.param == "input[0].content[0].file_id"
    turn: Any = {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": UNKNOWN}}]}
    with pytest.raises(anthropic.NotFoundError, match=r"messages\[0\]\.content\[0\]\.source\.file_id"):
        fake.anthropic().messages.create(model="fake", max_tokens=5, messages=[turn])


@pytest.mark.parametrize(
    ("fields", "file", "param"),
    [
        ({}, ("a.txt", b"x"), "purpose"),
        ({"purpose": "fine-tune"}, ("a.txt", b"x"), "purpose"),
        ({"purpose": "x" * 100}, ("a.txt", b"x"), "purpose"),
        ({"purpose": ["user_data", "user_data"]}, ("a.txt", b"x"), "purpose"),
        ({"purpose": "user_data", "expires_after[seconds]": "60"}, ("a.txt", b"x"), "expires_after[seconds]"),
        ({"purpose": "user_data"}, None, "file"),
        ({"purpose": "user_data"}, ("a\x1bb.txt", b"x"), "file"),
        ({"purpose": "user_data"}, ("ä" * 513, b"x"), "file"),
        ({"purpose": "user_data"}, ("folder/", b"x"), "file"),
    ],
)
def test_an_upload_is_two_fields(fake: Any, fields: dict[str, Any], file: Any, param: str) -> None:
    files = {"file": file} if file else {"other": (None, b"x")} if not fields else {"purpose": (None, b"user_data")}
    found = httpx.post(fake.url + "/v1/files", data=fields if file else {}, files=files, timeout=30)
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param


def test_names_have_no_folders(fake: Any) -> None:
    for given in ("../../etc/passwd.txt", "C:\\notes\\passwd.txt", "/passwd.txt"):
        sent = fake.openai().files.create(file=(given, b"x"), purpose="user_data")
        assert sent.filename == "passwd.txt"


@pytest.mark.parametrize("number", ["..%2F..%2Fetc%2Fpasswd", "..", "file-", ".lock", "%00", "a" * 5000, "file-%C3%A4"])
def test_what_is_no_id_is_not_found(fake: Any, number: str) -> None:
    for path in (f"/v1/files/{number}", f"/v1/files/{number}/content"):
        found = httpx.get(fake.url + path)
        assert found.status_code == 404
        assert len(found.content) < 6000
    assert httpx.delete(f"{fake.url}/v1/files/{number}").status_code in (404, 405)


def test_a_file_that_is_too_large_or_has_no_room_is_refused(serve_fake: Any) -> None:
    with serve_fake(files=FileInputs(max_file_bytes=5000, max_storage_bytes=10_000)) as running:
        files = running.openai().files
        for size, code in ((5001, "file_too_large"), (200_000, "file_too_large")):
            with pytest.raises(openai.APIStatusError) as caught:
                files.create(file=("a.txt", bytes(size)), purpose="user_data")
            assert (caught.value.status_code, caught.value.code, caught.value.param) == (413, code, "file")
        first = files.create(file=("a.txt", bytes(5000)), purpose="user_data")
        files.create(file=("b.txt", b""), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as caught:
            files.create(file=("c.txt", b""), purpose="user_data")
        assert (caught.value.status_code, caught.value.code) == (413, "file_storage_full")
        assert str(LEAST_CHARGE + 5000) in str(caught.value)
        found = running.metrics()["files"]
        assert found == {"kept": 2, "bytes": 5000 + LEAST_CHARGE, "bytes_limit": 10_000}
        files.delete(first.id)
        files.create(file=("c.txt", bytes(5000)), purpose="user_data")


def test_files_need_a_key_where_requests_do(serve_fake: Any, tmp_path: Path) -> None:
    made = CliRunner().invoke(cli, ["key", "make", "tests", "--file", str(tmp_path / "keys")])
    key = made.stdout.strip()
    with serve_fake(http=HttpSettings(api_key_file=str(tmp_path / "keys"))) as running:
        for method, path in (("POST", ""), ("GET", ""), ("GET", "/x"), ("DELETE", "/x"), ("GET", "/x/content")):
            assert httpx.request(method, running.url + "/v1/files" + path).status_code == 401
        client = openai.OpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0)
        assert client.files.create(file=("a.txt", b"x"), purpose="user_data").bytes == 1


def test_a_directory_outlasts_the_service_and_no_directory_does_not(serve_fake: Any, tmp_path: Path) -> None:
    limits = FileInputs(directory=str(tmp_path / "kept"))
    with serve_fake(files=limits) as running:
        sent = running.openai().files.create(file=("a.txt", b"colors"), purpose="user_data")
        with pytest.raises(ConfigError, match="another service"), serve_fake(files=limits):
            pass
    with serve_fake(files=limits) as running:
        assert running.openai().files.list().data == [sent]
        assert running.openai().files.content(sent.id).read() == b"colors"
    assert (tmp_path / "kept").stat().st_mode & 0o077 == 0
    store = FileStore(FileInputs(), os.urandom)
    store.add("a.txt", "user_data", b"x", 1)
    folder = store._folder
    assert folder.is_dir()
    store.close()
    assert not folder.exists()
    assert fault(lambda: store.get(UNKNOWN, "file_id")) == (503, "server_shutdown")


def test_what_was_interrupted_is_removed_and_what_is_damaged_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = kept_in(tmp_path)
    whole, *damaged = [store.add("a.txt", "user_data", b"colors", at).id for at in range(7)]
    store.close()
    (tmp_path / damaged[0] / CONTENT).write_bytes(b"colour")
    (tmp_path / damaged[1] / CONTENT).write_bytes(b"color")
    (tmp_path / damaged[2] / CONTENT).unlink()
    (tmp_path / damaged[3] / ABOUT).unlink()
    (tmp_path / damaged[4] / ABOUT).write_bytes(b'{"file": {}}')
    about = json.loads((tmp_path / damaged[5] / ABOUT).read_bytes())
    about["file"]["id"] = whole
    (tmp_path / damaged[5] / ABOUT).write_text(json.dumps(about))
    for name in (".new-" + UNKNOWN, ".gone-" + UNKNOWN):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONTENT).write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("left alone")
    with caplog.at_level("WARNING", "dgpp.files"):
        again = kept_in(tmp_path)
    assert [file.id for file in again.all()] == [whole]
    for number in damaged:
        assert [record for record in caplog.records if str(tmp_path / number) in record.message]
        assert fault(partial(again.read, number, "file_id")) == (404, "file_not_found")
        assert (tmp_path / number).is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([whole, *damaged, ".lock", "mine.txt"])
    (tmp_path / whole / CONTENT).write_bytes(b"colour")
    assert fault(lambda: again.read(whole, "file_id")) == (500, "file_processing_failed")
    again.delete(whole, "file_id")
    assert (again.count, again.charged) == (0, 0)
    again.close()


@pytest.mark.parametrize("name", ["fsync", "rename", "open"])
@pytest.mark.parametrize("at", range(4))
def test_an_upload_that_dies_on_the_way_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, at: int
) -> None:
    """One call into the system fails, as when the disk is full."""
    store = kept_in(tmp_path)
    calls, real = 0, getattr(os, name)

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing)
        error = error_of(lambda: store.add("a.txt", "user_data", b"colors", 1))
    assert (error is not None) == (calls > at)
    assert error is None or error.code == "file_processing_failed"
    assert (store.count, store.charged) == ((0, 0) if error else (1, LEAST_CHARGE))
    listed = store.all()
    store.close()
    again = kept_in(tmp_path)
    assert set(again.all()) >= set(listed)
    assert all(again.read(file.id, "file_id")[1] == b"colors" for file in again.all())
    again.close()


def test_uploads_at_once_keep_within_the_bound(tmp_path: Path) -> None:
    store = kept_in(tmp_path, max_storage_bytes=10 * LEAST_CHARGE)
    codes: list[str | None] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        own: list[str] = []
        for _ in range(20):
            if own and rng.random() < 0.5:
                store.delete(own.pop(), "file_id")
                continue
            try:
                own.append(store.add("a.txt", "user_data", rng.randbytes(LEAST_CHARGE), 1).id)
            except RequestError as error:
                codes.append(error.code)
            assert store.charged <= 10 * LEAST_CHARGE
        for number in own:
            data = store.read(number, "file_id")[1]
            assert len(data) == LEAST_CHARGE

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(codes) <= {"file_storage_full"}
    assert store.charged == LEAST_CHARGE * store.count
    held = {path.name for path in tmp_path.iterdir()} - {".lock"}
    assert held == {file.id for file in store.all()}
    store.close()


@pytest.mark.parametrize("directory", ["/dev/null", "/proc/dgpp/files"])
def test_a_directory_that_cannot_be_used_is_named_before_the_engine_starts(serve_fake: Any, directory: str) -> None:
    with (
        pytest.raises(ConfigError, match=directory) as caught,
        serve_fake(files=FileInputs(directory=directory)),
    ):
        pass
    assert "engine.file_inputs.directory" in caught.value.where


BODY = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="a.txt"\r\n\r\nco\r\n--lors\r\n--cut--\r\n'
)


def parsed(pieces: Sequence[bytes], most: int = 100) -> Upload:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece
        yield b""

    return asyncio.run(read_upload("multipart/form-data; boundary=cut", stream(), most))


def test_a_form_may_be_cut_anywhere() -> None:
    for first in range(0, len(BODY), 3):
        for second in range(first, len(BODY), 41):
            found = parsed([BODY[:first], BODY[first:second], BODY[second:]])
            assert found == Upload(filename="a.txt", purpose="user_data", data=b"co\r\n--lors")


def test_damaged_forms_are_refused_or_read(fake: Any) -> None:
    """Whatever bytes come, the answer is a file or an error of the request."""
    rng = random.Random(5)
    for number in range(800):
        body = bytearray(BODY)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(body))
            body[at : at + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 2, 20)))
        error = error_of(partial(parsed, [bytes(body)], 10))
        assert error is None or (error.status in (400, 413) and error.param)
        if number % 40 == 0:
            headers = {b"content-type": b"multipart/form-data; boundary=cut"}
            sent = httpx.post(fake.url + "/v1/files", content=bytes(body), headers=headers, timeout=30)
            assert sent.status_code in (200, 400)
    form = "multipart/form-data"
    for kind in ("", "application/json", form, f"{form}; boundary=", f"{form}; boundary=ä", f"{form}; boundary=x"):
        headers = {b"content-type": kind.encode()}
        sent = httpx.post(fake.url + "/v1/files", content=BODY, headers=headers, timeout=30)
        assert (sent.status_code, sent.json()["error"]["param"]) == (400, "body")


def test_the_digest_is_that_of_the_bytes(tmp_path: Path) -> None:
    store = kept_in(tmp_path)
    sent = store.add("a.txt", "user_data", NOTES, 5)
    about = json.loads((tmp_path / sent.id / ABOUT).read_bytes())
    assert about["sha256"] == hashlib.sha256(NOTES).hexdigest()
    assert sent.created_at == 5
    store.close()
