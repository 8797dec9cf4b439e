"""The command line as a whole: help, cold start, errors, exit codes, commands of plugins."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dgpp_core.api import ConfigError, EngineError, PluginError
from dgpp_core.cli.command import GuardedCommand, GuardedGroup, json_option
from dgpp_core.cli.main import COMMANDS, cli

IMPLEMENTED = [name for name in COMMANDS if name != "bench" or importlib.util.find_spec("dgpp_core.cli.bench")]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def dgpp(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    code = "from dgpp_core.cli.main import main; main()"
    whole = os.environ | environ
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=whole, timeout=120
    )


def test_help_names_every_command_exit_code_and_variable() -> None:
    text = run("--help").output
    for name, line in COMMANDS.items():
        assert f"  {name} " in text
        assert line in text
    for code in ("0 ", "1 ", "2 ", "130 "):
        assert f"\n    {code}" in text
    assert "DGPP_PLUGINS" in text


@pytest.mark.parametrize("name", IMPLEMENTED)
def test_every_command_has_its_line_and_examples(name: str) -> None:
    command = importlib.import_module(f"dgpp_core.cli.{name.replace('-', '_')}").command
    assert command.get_short_help_str(limit=200) == COMMANDS[name]
    commands: list[tuple[str, ...]] = [(name,)]
    if isinstance(command, click.Group):
        commands += [(name, sub) for sub in command.commands]
    for path in commands:
        text = run(*path, "--help").output
        assert "Examples:" in text
        assert f"dgpp {' '.join(path)}" in text.split("Examples:")[1]


def test_help_imports_neither_torch_nor_a_command() -> None:
    code = (
        "import sys\nfrom dgpp_core.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "bad = {'torch', 'litestar', 'rich', 'numpy', 'importlib.metadata'} & set(sys.modules)\n"
        "bad |= {m for m in sys.modules if m.startswith('dgpp_core.cli.') and m[14:] not in ('main', 'command')}\n"
        "sys.exit(' '.join(sorted(bad)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_command_but_those_that_compute_imports_torch() -> None:
    modules = ", ".join(f"dgpp_core.cli.{name.replace('-', '_')}" for name in IMPLEMENTED if name != "bench")
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules or 'litestar' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _fastest(code: str) -> float:
    def once() -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code, "--help"], check=True, capture_output=True, timeout=60)
        return time.perf_counter() - started

    return min(once() for _ in range(5))


def test_cold_start_costs_little_more_than_click() -> None:
    ours = _fastest("from dgpp_core.cli.main import main; main()")
    bare = _fastest("import click")
    assert ours < 5 * bare, (ours, bare)


def test_an_unknown_command_is_a_usage_error() -> None:
    done = dgpp("servr")
    assert done.returncode == 2
    assert "servr" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("bad", where="file", found="1", expected="2", hint="edit it"), 2),
        (PluginError("bad", where="plugin"), 1),
        (EngineError("dead"), 2),
    ],
)
def test_an_error_is_printed_in_its_parts_and_sets_the_exit_code(error: ConfigError, code: int) -> None:
    @click.command(cls=GuardedCommand)
    @json_option
    def failing(as_json: bool) -> None:
        raise error

    plain = CliRunner().invoke(failing, [])
    assert plain.exit_code == code
    assert plain.stderr == f"error: {error}\n"
    assert plain.stdout == ""
    as_json = CliRunner().invoke(failing, ["--json"])
    assert as_json.exit_code == code
    assert json.loads(as_json.stderr) == {"error": {"type": type(error).__name__, **error.parts()}}


def test_an_unforeseen_error_has_a_traceback_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command(cls=GuardedCommand)
    def failing() -> None:
        raise ZeroDivisionError("by nought")

    monkeypatch.delenv("DGPP_DEBUG", raising=False)
    plain = CliRunner().invoke(failing, [])
    assert plain.exit_code == 1
    assert "found: ZeroDivisionError: by nought" in plain.stderr
    assert f"where: {__file__}:" in plain.stderr
    assert "Traceback" not in plain.stderr
    monkeypatch.setenv("DGPP_DEBUG", "1")
    assert "Traceback" in CliRunner().invoke(failing, []).stderr


def test_ctrl_c_is_130() -> None:
    code = (
        "import dgpp_core.cli.version as v, dgpp_core.cli.main as m\n"
        "def stop(*a, **k): raise KeyboardInterrupt\n"
        "v.versions = stop\nm.main()"
    )
    done = subprocess.run([sys.executable, "-c", code, "version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "from dgpp_core.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code, "version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert (process.wait(60), errors) == (0, "")


COMMANDING = """
import click
from dgpp_core.api import PluginError, hookimpl
DGPP_API = 1
@hookimpl
def dgpp_models(): return ()
@hookimpl
def dgpp_bindings(spec): ...
@hookimpl
def dgpp_groups(spec): ...
@hookimpl
def dgpp_build(spec): ...
@hookimpl
def dgpp_commands(cli):
    @cli.command("greet")
    @click.argument("name")
    def greet(name):
        if name == "nobody":
            raise PluginError("there is nobody to greet")
        click.echo(f"hello {name}")
"""


def _install(folder: Path, name: str) -> None:
    (folder / f"commanding_{name}.py").write_text(COMMANDING)
    info = folder / f"commanding_{name}-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: commanding-{name}\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[dgpp.plugins]\n{name} = commanding_{name}\n")


def test_a_plugin_adds_a_command(tmp_path: Path) -> None:
    _install(tmp_path, "one")
    done = dgpp("greet", "you", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "hello you\n"), done.stderr
    assert "commands of one: greet" in dgpp("plugins", "list", PYTHONPATH=str(tmp_path)).stdout
    assert dgpp("greet", "you", PYTHONPATH=str(tmp_path), DGPP_PLUGINS="none").returncode == 2


def test_a_plugins_command_fails_as_ours_do(tmp_path: Path) -> None:
    _install(tmp_path, "one")
    done = dgpp("greet", "nobody", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "error: there is nobody to greet\n")


def test_two_plugins_with_one_command_are_named(tmp_path: Path) -> None:
    _install(tmp_path, "one")
    _install(tmp_path, "two")
    done = dgpp("greet", "you", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "commanding-one 2.0" in done.stderr
    assert "commanding-two 2.0" in done.stderr
    assert dgpp("greet", "you", PYTHONPATH=str(tmp_path), DGPP_PLUGINS="two").stdout == "hello you\n"


def test_subcommands_are_guarded_too() -> None:
    @click.group(cls=GuardedGroup)
    def group() -> None: ...

    @group.command("inner")
    def inner() -> None:
        raise PluginError("no")

    assert CliRunner().invoke(group, ["inner"]).stderr == "error: no\n"


@pytest.mark.parametrize(
    ("environ", "turns"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["own", "given", "policy"],
)
def test_threads_that_wait_sleep_before_long_unless_told_otherwise(environ: dict[str, str], turns: str) -> None:
    """What is set before torch is loaded, seen from a command."""
    code = "from dgpp_core.cli import main as m, version; import os, click\n"
    code += "version.command = click.Command('version', callback=lambda: print(os.environ.get('GOMP_SPINCOUNT')))\n"
    code += "m.main()"
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    whole = {name: value for name, value in os.environ.items() if name not in names} | environ
    done = subprocess.run(
        [sys.executable, "-c", code, "version"], capture_output=True, text=True, env=whole, timeout=60
    )
    assert done.stdout.strip() == turns, done.stderr
