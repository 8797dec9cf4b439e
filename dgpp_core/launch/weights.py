"""Bringing a checkpoint to every node: fetched once on rank 0, then copied and compared file by file."""

from __future__ import annotations

import shlex
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from dgpp_core.api.errors import LaunchError
from dgpp_core.host.child import program_command
from dgpp_core.launch.agent import releases
from dgpp_core.launch.nodes import Node, SshNode, call, call_for, each

COPY_S, DIGEST_S = 6 * 3600.0, 3600.0
PIECE = 1 << 20
TENTHS = 10

Say = Callable[[str], None]


def unit_of(checkpoint: Path) -> Path:
    """The folder to copy: a snapshot of the Hugging Face cache is links into the folder of its repository."""
    return checkpoint.parents[1] if checkpoint.parent.name == "snapshots" else checkpoint


def sync(nodes: Sequence[Node], checkpoint: Path, target_of: Callable[[Node], str], say: Say) -> None:
    """Copy a checkpoint to nodes that have it in part or not at all, and compare every file of it.

    Args:
        checkpoint: the folder that is served, on this host.
        target_of: where a node keeps `unit_of` it; ``~/`` is expanded there.

    Raises:
        LaunchError: a copy fails, or a file differs after it.
    """
    unit = unit_of(checkpoint)
    within = checkpoint.relative_to(unit)
    mine = releases.digests(str(checkpoint))

    def bring(node: Node) -> None:
        target = target_of(node)
        if _differences(node, f"{target}/{within}", mine):
            _copy(unit, node, call(node, releases.prepare, target), say)
        if left := _differences(node, f"{target}/{within}", mine):
            raise LaunchError(
                "a checkpoint differs from rank 0's", where=f"{node.name}:{target}/{within}", found="; ".join(left[:8]),
                expected="the same bytes", hint="remove it there and run `dgpp cluster fetch` again",
            )  # fmt: skip
        say(f"{node.name}: {len(mine)} files as on rank 0")

    each(nodes, bring)


def verify(nodes: Sequence[Node], checkpoint: Path, target_of: Callable[[Node], str]) -> list[str]:
    """What differs from rank 0's checkpoint, on every node."""
    mine, within = releases.digests(str(checkpoint)), checkpoint.relative_to(unit_of(checkpoint))
    found = each(nodes, lambda node: _differences(node, f"{target_of(node)}/{within}", mine))
    return [f"{node.name}: {one}" for node, many in zip(nodes, found, strict=True) for one in many]


def _differences(node: Node, folder: str, mine: Mapping[str, str]) -> list[str]:
    theirs = call_for(DIGEST_S, node, releases.digests, folder)
    return [
        f"{name} {'differs' if name in theirs else 'is missing'}" for name in mine if theirs.get(name) != mine[name]
    ]


def _copy(unit: Path, node: Node, target: str, say: Say) -> None:
    """By rsync where both sides have it, which goes on where it was interrupted; else by tar."""
    if isinstance(node, SshNode) and releases.has("rsync") and call(node, releases.has, "rsync"):
        line = ["rsync", "-a", "--partial", "--checksum", "--info=progress2", "-e", shlex.join(node.options())]
        _pump([*line, f"{unit}/", f"{_bracketed(node.name)}:{target}/"], None, node, say)
        return
    total = sum(path.stat().st_size for path in unit.rglob("*") if path.is_file() and not path.is_symlink())
    with subprocess.Popen(program_command("tar", "-C", str(unit), "-cf", "-", "."), stdout=subprocess.PIPE) as source:
        assert source.stdout is not None, "it was asked for"
        _pump(node.command(["tar", "-C", target, "-xf", "-"]), (source.stdout, total), node, say)
    if source.returncode:
        raise LaunchError("a checkpoint cannot be read", where=str(unit), found=f"tar: exit status {source.returncode}")


def _bracketed(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _pump(line: Sequence[str], source: tuple[IO[bytes], int] | None, node: Node, say: Say) -> None:
    """Run a copy to its end, with every tenth of it said.

    Args:
        source: what it is fed, and how many bytes are expected; None for one that says itself how far it is.
    """
    told, pipe = _Tenths(lambda tenth: say(f"{node.name}: {tenth}0% copied")), subprocess.PIPE
    fed = pipe if source else subprocess.DEVNULL
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(program_command(*line), stdin=fed, stdout=None if source else pipe, stderr=errors) as process,
    ):
        late = threading.Timer(COPY_S, process.kill)
        late.start()
        try:
            if source is not None:
                _feed(process, *source, told)
            elif process.stdout is not None:
                while piece := process.stdout.read1(4096):  # type: ignore[attr-defined]
                    told.percent(piece)
            process.wait()
        finally:
            late.cancel()
        errors.seek(0)
        words = errors.read().decode("utf-8", "replace").strip().splitlines()
    if process.returncode:
        found = words[-1] if words else f"exit status {process.returncode}"
        raise LaunchError(
            "a copy failed", where=node.name, found=found, hint="run it again: it goes on where it stopped"
        )
    told.reached(TENTHS)


def _feed(process: subprocess.Popen[bytes], data: IO[bytes], total: int, told: _Tenths) -> None:
    assert process.stdin is not None, "it was asked for"
    done = 0
    try:
        with process.stdin as sink:
            while piece := data.read(PIECE):
                sink.write(piece)
                done += len(piece)
                told.reached(min(TENTHS, TENTHS * done // max(1, total)))
    except BrokenPipeError:
        return  # its exit status says why


class _Tenths:
    """Says each tenth once."""

    def __init__(self, say: Callable[[int], None]) -> None:
        self._say, self._last = say, 0

    def reached(self, tenth: int) -> None:
        if tenth > self._last:
            self._last = tenth
            self._say(tenth)

    def percent(self, text: bytes) -> None:
        """Takes the progress lines of rsync: the last number before a per cent sign."""
        words = [word[:-1] for word in text.split() if word.endswith(b"%") and word[:-1].isdigit()]
        if words:
            self.reached(int(words[-1]) // TENTHS)
