"""API keys: the file, the command that writes it, and what a service with keys answers."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner, Result

from dgpp_core.api.errors import ConfigError
from dgpp_core.cli.main import cli
from dgpp_core.config.settings import HttpSettings
from dgpp_core.server.keys import KeyRing, parse_keys, read_keys
from dgpp_core.server.openapi import document

REQUEST = {"model": "fake", "messages": [{"role": "user", "content": "colors"}]}
DIGEST = hashlib.sha256(b"secret").hexdigest()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["key", *arguments])


def made(file: Path, name: str) -> str:
    done = run("make", name, "--file", str(file))
    assert done.exit_code == 0, done.stderr
    return done.stdout.strip()


def test_a_key_is_made_listed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    alice, bob = made(file, "alice"), made(file, "bob")
    assert alice != bob
    assert len(alice) == len("dgpp-") + 64
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text()
    assert alice not in text
    assert hashlib.sha256(alice.encode()).hexdigest() in text
    assert [line.split()[0] for line in run("list", "--file", str(file)).stdout.splitlines()] == ["alice", "bob"]
    assert run("make", "alice", "--file", str(file)).exit_code == 2
    assert run("remove", "alice", "--file", str(file)).exit_code == 0
    assert [key.name for key in read_keys(file)] == ["bob"]
    assert run("remove", "alice", "--file", str(file)).exit_code == 2
    assert list(tmp_path.iterdir()) == [file]


def test_the_site_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DGPP_API_KEY_FILE", str(tmp_path / "keys"))
    assert run("make", "alice").exit_code == 0
    assert run("list").stdout.startswith("alice  sha256:")
    monkeypatch.delenv("DGPP_API_KEY_FILE")
    monkeypatch.chdir(tmp_path)
    assert "--file FILE" in run("list").stderr


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("secret alice", "not a hashed key"),
        (f"sha256:{DIGEST}", "not a hashed key"),
        (f"sha256:{DIGEST[:-1]} alice", "not a hashed key"),
        (f"sha256:{DIGEST} a b", "not a hashed key"),
        (f"sha256:{DIGEST} alice\nsha256:{DIGEST} bob", "twice"),
        (f"sha256:{DIGEST} alice\nsha256:{DIGEST[::-1]} alice", "twice"),
    ],
)
def test_a_bad_file_is_refused_without_showing_what_may_be_a_key(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_keys(text, "keys")
    assert what in raised.value.what
    assert "secret" not in str(raised.value)
    assert "line" in raised.value.where


def test_a_changed_file_counts_at_once_and_a_broken_one_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    alice = made(file, "alice")
    ring = KeyRing(file)
    assert ring.holder(alice.encode()) == "alice"
    assert ring.holder(alice.encode() + b"0") is None
    assert ring.holder(b"\xff") is None
    bob = made(file, "bob")
    assert ring.holder(bob.encode()) == "bob"
    run("remove", "alice", "--file", str(file))
    assert ring.holder(alice.encode()) is None
    file.write_text("what is this\n")
    assert ring.holder(bob.encode()) == "bob"
    assert "stay as they were" in caplog.text
    file.unlink()
    assert ring.holder(bob.encode()) == "bob"


def test_an_empty_or_missing_file_serves_nobody(tmp_path: Path) -> None:
    for name in ("missing", "empty"):
        (tmp_path / "empty").write_text("# nobody yet\n")
        with pytest.raises(ConfigError) as raised:
            KeyRing(tmp_path / name)
        assert "dgpp key make" in raised.value.hint


def test_a_service_with_keys(serve_fake: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = made(file, "alice")
    with serve_fake(http=HttpSettings(api_key_file=str(file))) as running, httpx.Client(base_url=running.url) as client:
        for path in ("/health", "/openapi.json", "/", "/page/main.js"):
            assert client.get(path).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key}"}, {"x-api-key": ""}):
            for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/metrics"),
                                 ("GET", "/v1/models"), ("GET", "/v1/models/fake")):  # fmt: skip
                response = client.request(method, path, headers=headers, json=REQUEST)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                error = response.json()["error"]
                assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert client.post("/v1/chat/completions", headers=headers, json=REQUEST).status_code == 200
        assert client.get("/nowhere").status_code == 404
        good = openai.OpenAI(base_url=running.url + "/v1", api_key=key, max_retries=0)
        assert good.models.list().data[0].id == "fake"
        bad = openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            bad.models.list()


def test_every_documented_route_wants_a_key(serve_fake: Any, tmp_path: Path) -> None:
    made(tmp_path / "keys", "alice")
    refused = []
    with serve_fake(http=HttpSettings(api_key_file=str(tmp_path / "keys"))) as running:
        for path, item in json.loads(document())["paths"].items():
            for method in {"get", "post", "delete"} & set(item):
                url = running.url + re.sub(r"\{[^}]*\}", "fake", path)
                if httpx.request(method, url, headers={"x-api-key": "wrong"}).status_code == 401:
                    refused.append(path)
    assert set(json.loads(document())["paths"]) - set(refused) == {"/health"}


def test_our_own_client_shows_a_key(serve_fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = made(tmp_path / "keys", "alice")
    with serve_fake(http=HttpSettings(api_key_file=str(tmp_path / "keys"))) as running:
        ask = ["chat", "--url", running.url, "--message", "colors"]
        monkeypatch.delenv("DGPP_API_KEY", raising=False)
        assert "needs an API key" in CliRunner().invoke(cli, ask).stderr
        assert CliRunner().invoke(cli, [*ask, "--api-key", key]).stdout == "Red, yellow and blue.\n"
        monkeypatch.setenv("DGPP_API_KEY", key)
        assert CliRunner().invoke(cli, ask).stdout == "Red, yellow and blue.\n"
        bench = ["bench", "serve", "--url", running.url, "--streams", "1", "--max-tokens", "4"]
        assert CliRunner().invoke(cli, bench).exit_code == 0


def test_a_refused_body_is_not_waited_for(serve_fake: Any, tmp_path: Path) -> None:
    made(tmp_path / "keys", "alice")
    http = HttpSettings(api_key_file=str(tmp_path / "keys"))
    with serve_fake(http=http) as running, httpx.Client(base_url=running.url) as client:
        for _ in range(3):  # on one connection: what is left of a body is not taken for the next request
            assert client.post("/v1/completions", content=b"x" * 3_000_000).status_code == 401
        assert client.get("/health").status_code == 200
