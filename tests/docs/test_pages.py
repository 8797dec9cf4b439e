"""The pages agree with the code and with each other."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from dgpp_core.api import API_VERSION, ENTRY_POINT_GROUP
from dgpp_core.cli.main import cli
from dgpp_core.server import app as server_app
from dgpp_core.server.openapi import document
from dgpp_core.server.requests import LEGACY_REFUSED, REFUSED_IF_PRESENT, REFUSED_IF_SET

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """``docs/tables.py``."""
    spec = importlib.util.spec_from_file_location("docs_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_those_of_the_code(page: Path, tables: ModuleType) -> None:
    assert tables.filled(text(page)) == text(page), "run: python docs/tables.py"


def test_every_table_is_in_a_page(tables: ModuleType) -> None:
    placed = re.findall(r"<!-- table: ([a-z-]+) -->", "".join(map(text, PAGES)))
    assert sorted(placed) == sorted(tables.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(FENCED.sub("", text(page))):
        if not target.startswith("http"):
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(LINK.findall(text(PAGES[0])))
    assert {f"docs/{page.name}" for page in PAGES[1:]} <= linked


def test_the_plan_shown_is_the_plan() -> None:
    done = CliRunner().invoke(cli, ["plan", "--plugin", "smollm2", "--device", "cpu", "--available", str(1 << 40)])
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.partition("-----")[0]
    assert f"```text\n{lines}```" in text(DOCS / "start.md")


def test_every_route_is_in_the_api_page() -> None:
    page = text(DOCS / "api.md")
    own = (server_app.get_metrics, server_app.get_openapi, server_app.get_health, server_app.list_models)
    paths = {path for handler in own for path in handler.paths} | set(json.loads(document())["paths"])
    for path in paths:
        assert re.sub(r"\{[^}]*\}", "{id}", path) in page, path


def test_every_refused_field_is_in_the_api_page() -> None:
    refusals = text(DOCS / "api.md").split("## Differences to OpenAI")[1]
    for name in (*REFUSED_IF_PRESENT, *REFUSED_IF_SET, *(set(LEGACY_REFUSED) - {"top_logprobs"})):
        assert f"`{name}`" in refusals, name


def test_every_error_code_is_in_the_api_page() -> None:
    served = [ROOT / "dgpp_core" / part for part in ("api", "server", "text", "images")]
    source = "".join(text(file) for folder in served for file in sorted(folder.rglob("*.py")))
    codes = set(re.findall(r'\bcode="([a-z_]+)"', source))
    assert {"overloaded", "model_not_found"} <= codes
    page = text(DOCS / "api.md")
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    wanted = [*project["dependencies"], *(d for more in project["optional-dependencies"].values() for d in more)]
    names = {re.split(r"[><=;\[ ]", requirement)[0] for requirement in wanted} - {"dgpp-core"}
    rows = re.findall(r"^\| ([^|]+) \|", text(DOCS / "dependencies.md"), re.MULTILINE)
    explained = {name.strip() for row in rows for name in row.split(",")} - {"package", "---"}
    assert explained == names


def test_the_plugin_page_names_this_contract() -> None:
    page = text(DOCS / "plugins.md")
    assert f"DGPP_API = {API_VERSION}\n" in page
    assert f'entry-points."{ENTRY_POINT_GROUP}"' in page
