"""The command `dgpp`. Commands are imported when they are run, so that ``dgpp --help`` costs nothing."""

from __future__ import annotations

import importlib
import os
import sys

import click

from dgpp_core import __version__
from dgpp_core.cli.command import CONTEXT, GuardedGroup

COMMANDS = {
    "serve": "Serve a model over the OpenAI API.",
    "rank": "Run one rank of a world that `dgpp serve --rendezvous` leads.",
    "cluster": "Start, stop and watch a model on several hosts.",
    "setup": "Set up a site: settings, RDMA devices, checkpoint.",
    "doctor": "Say whether the hosts of the site are fit to serve.",
    "chat": "Talk to a model in the terminal.",
    "key": "Make, list and remove API keys.",
    "plan": "Print the memory plan of a model; exit 1 when it does not fit.",
    "resolve": "Print the deployment as it would run.",
    "synth": "Write a random checkpoint of a model.",
    "plugins": "List and check the installed plugins.",
    "new-plugin": "Write the package of a new plugin.",
    "bench": "Measure decode, prefill or a running service.",
    "simulate": "Try worlds of ranks against faults, in virtual time.",
    "version": "Print the versions of dgpp, its plugins and its libraries.",
}
"""Each command's one line of help; it lives in ``dgpp_core.cli.NAME`` as ``command``."""

EPILOG = """\b
Examples:
  dgpp serve --plugin smollm2
  dgpp chat --message "Name three primary colors."
  dgpp plan --plugin smollm2 --max-concurrency 32
  dgpp plugins list

\b
Exit codes:
  0    done, or an orderly stop
  1    refused: a plan that does not fit, a damaged checkpoint, a broken plugin
  2    a wrong command line or a malformed configuration, or an engine that failed
  130  interrupted with Ctrl-C

\b
Environment:
  DGPP_PLUGINS  plugins to load, with commas between, or none (default: all)
  DGPP_API_KEY  the key that `dgpp chat` and `dgpp bench serve` show
  DGPP_DEBUG    1 prints the traceback of an error
"""


class LazyGroup(GuardedGroup):
    """Commands by name from `COMMANDS`; those of plugins only when a name is asked for that is not in it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The built-in commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import the command ``name``, or ask the plugins for it."""
        if name in COMMANDS:
            module = importlib.import_module(f"dgpp_core.cli.{name.replace('-', '_')}")
            found: click.Command = module.command
            return found
        from dgpp_core.cli.extensions import plugin_command

        return plugin_command(name, os.environ)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table itself: asking the commands for their help would import them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings=CONTEXT, epilog=EPILOG)
@click.version_option(__version__, message="dgpp %(version)s", help="Print the version.")
def cli() -> None:
    """Serve large language models: exact, loud and fast.

    A model comes from a plugin package (`dgpp plugins list`), its weights from the Hugging Face cache or a folder.
    """


def main() -> None:
    """Run the command line."""
    # Before torch is loaded. Its threads wait for each other in a loop of milliseconds, which keeps the processor from
    # whoever they wait for where another program is busy too. This many turns are some tens of microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        code = cli.main(prog_name="dgpp", standalone_mode=False)
    except click.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)
