"""``dgpp simulate``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import msgspec

from dgpp_core.cli.command import GuardedCommand, json_option, print_json, print_table

EPILOG = """\b
Examples:
  dgpp simulate --seeds 2000
  dgpp simulate --seed 12345
  dgpp simulate --seeds 100000 --first 2000 --out result.json

Every seed is a world of one to four ranks with requests and faults of its own, in virtual time. Nothing is loaded, and
no model is needed. What goes wrong is printed with the command that shows it again.
Exit code 1 where something that must hold does not.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--seeds", type=click.IntRange(1), default=1000, show_default=True, help="How many.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="The first of them.")
@click.option("--seed", type=click.IntRange(0), help="This one alone, and what it is about.")
@click.option("--world", type=click.IntRange(1, 8), help="Ranks of every world.  [default: as the seed says]")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the tally to this file too.")
@json_option
def command(seeds: int, first: int, seed: int | None, world: int | None, out: Path | None, as_json: bool) -> None:
    """Try worlds of ranks against faults, in virtual time."""
    from dgpp_core.testing.sim.runs import Violation, play, simulate
    from dgpp_core.testing.sim.scenario import draw
    from dgpp_core.testing.sim.world import Run

    if seed is not None:
        scenario, run = draw(seed, world), play(seed, world)
        print_json({"scenario": scenario, "run": run})
        click.get_current_context().exit(int(isinstance(run, Violation)))
    done = [0]

    def report(run: Run | Violation) -> None:
        done[0] += 1
        if isinstance(run, Violation):
            click.echo(f"{run.replay}: {run.what}", err=True)
        if done[0] % 10_000 == 0:
            click.echo(f"{done[0]} of {seeds} seeds", err=True)

    started, processor = time.monotonic(), time.process_time()
    tally = simulate(range(first, first + seeds), world, report)
    found = {
        "command": f"dgpp simulate --seeds {seeds} --first {first}" + (f" --world {world}" if world else ""),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "seconds": round(time.monotonic() - started, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
        **msgspec.structs.asdict(tally),
    }
    if out is not None:
        out.write_text(msgspec.json.format(msgspec.json.encode(found), indent=1).decode() + "\n", encoding="utf-8")
    if as_json:
        print_json(found)
    else:
        click.echo(
            f"{tally.seeds} worlds in {found['seconds']} s: {tally.steps} steps, {tally.answered} requests answered, "
            f"{sum(ended for _, ended in tally.troubles.values())} faults named, the last after {tally.found_s} s; "
            f"{len(tally.violations)} violations"
        )
        print_table(
            ["fault", "worlds", "ended by it"], [[kind, *map(str, two)] for kind, two in tally.troubles.items()]
        )
    click.get_current_context().exit(int(bool(tally.violations)))
