"""The page's files as they are sent, and what may not be in them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from dgpp_core.server.page import TYPES, read_files

FILES = read_files()
ROOT = Path(__file__).parents[3]


def test_every_file_is_sent_with_its_type_and_a_policy(fake: Any) -> None:
    with httpx.Client(base_url=fake.url) as client:
        assert client.get("/").content == FILES["index.html"].body
        for name, file in FILES.items():
            response = client.get(f"/page/{name}")
            assert response.content == file.body
            assert response.headers["content-type"].partition(";")[0] == TYPES[name.rpartition(".")[2]]
            assert "default-src 'none'" in response.headers["content-security-policy"]
            assert "unsafe" not in response.headers["content-security-policy"]
            again = client.get(f"/page/{name}", headers={"if-none-match": response.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            assert client.get(f"/page/{name}", headers={"if-none-match": '"other"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page/other.js", "/page/", "/page/../app.py", "/page/%2e%2e/__init__.py"])
def test_nothing_else_is_sent(fake: Any, path: str) -> None:
    response = httpx.get(fake.url + path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_what_is_named_exists_and_nothing_is_loaded_from_elsewhere() -> None:
    index = FILES["index.html"].body.decode()
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', index))
    for name, file in FILES.items():
        text = file.body.decode()
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not re.search(r"@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
    assert named | {"index.html"} == set(FILES)
    assert not re.search(r'(?:src|href)="(?!/page/|#)', index)
    assert not re.search(r"<script>|\son\w+=|style=", index)
    ids = re.findall(r'\bid="([^"]+)"', index)
    assert len(ids) == len(set(ids))
    used = {found for name, file in FILES.items() if name.endswith(".js")
            for found in re.findall(r'\$\("([^"]+)"\)', file.body.decode())}  # fmt: skip
    assert used <= set(ids)


@pytest.mark.slow
def test_a_wheel_has_the_files(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {Path(name).name for name in archive.namelist() if "/page/static/" in name}
    assert inside == set(FILES)
