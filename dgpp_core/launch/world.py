"""A world as it is started: where each rank runs, where it leaves its files, and the record that finds it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dgpp_core.api.errors import LaunchError
from dgpp_core.config.addresses import Address
from dgpp_core.config.resolve import Resolved
from dgpp_core.config.rules import RULES
from dgpp_core.config.site import ENV_FILE, Site
from dgpp_core.launch.agent.processes import MARK

DEPLOYMENT, RESOLVED, WORLD, EPOCH, LOCK = (
    "deployment.json", "cluster.resolved.json", "world.json", "epoch", "launcher.lock",
)  # fmt: skip
FORWARDED = ("DGPP_", "NCCL_", "GLOO_", "OMP_")
PRIVATE = ("DGPP_API_KEY", ENV_FILE, MARK)
"""Exported variables that stay here although a prefix of `FORWARDED` fits."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """The software of every rank.

    Attributes:
        python: what runs it, ``~/`` not expanded.
        release: the folder of an installed release, likewise; empty for what ``python`` has installed.
    """

    python: str
    release: str = ""

    def line(self, home: str) -> list[str]:
        """The command `dgpp`, on a node with this home folder."""
        return [expand(self.python, home), "-P", "-m", "dgpp_core.cli"]

    def environ(self, home: str) -> dict[str, str]:
        """What the command needs in its environment."""
        return {"PYTHONPATH": expand(self.release, home) + "/lib"} if self.release else {}


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank. Files have its number in their names: nodes may share a folder.

    Attributes:
        folder: its files, on its node, absolute.
    """

    rank: int
    node: str
    folder: str

    @property
    def record(self) -> str:
        """The file that its process is recorded in."""
        return f"rank{self.rank}.process.json"

    @property
    def site(self) -> str:
        """Its site file."""
        return f"rank{self.rank}.env"

    def log(self, epoch: int) -> str:
        """The file of its output."""
        return f"rank-{self.rank}.epoch-{epoch}.log"

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.node})"


class World(msgspec.Struct, frozen=True, kw_only=True):
    """What was started from a deployment file.

    Attributes:
        deployment: the file's absolute path.
        epoch: which start it is.
        started: Unix time in seconds.
        url: of the service.
    """

    deployment: str
    epoch: int
    started: float
    program: Program
    url: str
    ssh_user: str
    ssh_config: str
    members: tuple[Member, ...]


class Places(msgspec.Struct, frozen=True):
    """Folders of a deployment: on rank 0 (absolute), and on every other node (``~/`` not expanded)."""

    log: Path
    stage: str


def deployment_id(deployment: Path) -> str:
    """16 hex digits that tell one deployment file from others: of SHA-256 of its absolute path."""
    return hashlib.sha256(str(deployment.absolute()).encode()).hexdigest()[:16]


def log_root(log_dir: str) -> Path:
    """Where rank 0 keeps a folder for each deployment."""
    return Path(log_dir).expanduser().absolute() / "deployments"


def places(resolved: Resolved, deployment: Path, log_dir: str | None = None) -> Places:
    """The folders of a deployment; an explicit ``log_dir`` is used as it is."""
    name = deployment_id(deployment)
    log = Path(log_dir).expanduser().absolute() if log_dir else log_root(resolved.paths.log_dir) / name
    return Places(log, f"{resolved.paths.stage_dir}/deployments/{name}")


def expand(path: str, home: str) -> str:
    """A path on a node with this home folder."""
    return home + path[1:] if path.startswith("~/") else path


def read_world(folder: Path) -> World | None:
    """The world that was started last with its records in ``folder``; None for none.

    Raises:
        LaunchError: the file is damaged.
    """
    try:
        return msgspec.json.decode((folder / WORLD).read_bytes(), type=World)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise LaunchError("the record of a world is damaged", where=str(folder / WORLD), found=str(error)) from None


def rank_line(resolved: Resolved, member: Member, epoch: int, everywhere: str) -> list[str]:
    """The arguments of `dgpp` that start a rank. Every checkpoint is there already: none fetches one.

    Args:
        everywhere: where rank 0 listens for the others; of `dgpp_core.config.addresses.everywhere`.
    """
    files = ["--config", f"{member.folder}/{DEPLOYMENT}", "--log-dir", member.folder, "--offline"]
    if resolved.world == 1:
        return ["serve", *files]
    journal = resolved.ports.journal
    if member.rank == 0:
        return ["serve", *files, "--rendezvous", str(Address(everywhere, journal)), "--epoch", str(epoch)]
    return [
        "rank", *files, "--rank", str(member.rank), "--world", str(resolved.world),
        "--rendezvous", str(Address(resolved.nodes[0], journal)), "--epoch", str(epoch),
    ]  # fmt: skip


def rank_environ(environ: Mapping[str, str], member: Member, interface: str) -> dict[str, str]:
    """What a rank gets in its environment beside its node's own.

    Args:
        environ: the launcher's.
        interface: the network interface towards the other ranks; libraries would otherwise go by the host's name,
            which many systems map to a loopback address.
    """
    own = {ENV_FILE: f"{member.folder}/{member.site}", "PYTHONUNBUFFERED": "1"}
    return own | network_environ(environ, interface)


def network_environ(environ: Mapping[str, str], interface: str) -> dict[str, str]:
    """What programs that talk to other nodes get: as `rank_environ`, without a rank's files."""
    own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    given = {
        name: value
        for name, value in environ.items()
        if name.startswith(FORWARDED) and name not in RULES and name not in PRIVATE
    }
    return own | given


def site_of(site: Site, resolved: Resolved, rank: int) -> str:
    """The site file of one rank: what a server reads of the site, with its node's own settings decided.

    The service's address is as resolved, so that what the deployment goes before is said by the launcher alone.
    """
    values = {
        "DGPP_NODES": " ".join(site.nodes),
        "DGPP_HTTP_PORT": str(resolved.http.port),
        "DGPP_HTTP_BIND": resolved.http.bind_host,
        "DGPP_BUS": site.bus,
        "DGPP_FABRIC_PORT": str(site.fabric_port),
        "DGPP_JOURNAL_PORT": str(site.journal_port),
        **resolved.node_env[rank],
    }
    if rank == 0 and resolved.http.api_key_file:
        values["DGPP_API_KEY_FILE"] = resolved.http.api_key_file
    return "".join(f"{name}={_quoted(value)}\n" for name, value in values.items())


def _quoted(value: str) -> str:
    quote = "'" if '"' in value else '"'
    if quote in value:
        raise LaunchError("a setting has quotes of both kinds", where="site file", found=value)
    return f"{quote}{value}{quote}"
