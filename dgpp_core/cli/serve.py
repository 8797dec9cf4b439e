"""``dgpp serve``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from dgpp_core.cli.command import GuardedCommand
from dgpp_core.cli.options import (
    bus_option,
    capacity_options,
    log_dir_option,
    model_options,
    offline_option,
    service_options,
    world_option,
)
from dgpp_core.cli.relaunch import Relaunch
from dgpp_core.cli.serving import (
    choose,
    find_checkpoint,
    serve_options,
    warn_of_hidden_keys,
    warn_of_idle_keys,
    world_options,
)
from dgpp_core.host.loading import load_plugins
from dgpp_core.server.logs import LogFormat, set_up
from dgpp_core.server.options import SamplingOverrides, ServeOptions

EPILOG = """\b
Examples:
  dgpp serve --plugin smollm2
  dgpp serve --plugin smollm2 --port 8000 --max-concurrency 16 --kv-capacity 32768
  dgpp serve --checkpoint ./my-checkpoint --device cpu
  dgpp serve --config smollm2.json --temperature 0 --seed 7
  dgpp serve --plugin smollm2 --host 0.0.0.0 --api-key-file ./keys --log-format json
  dgpp serve --plugin glm47 --world 2 --relaunch 3        # two ranks on this host
  dgpp serve --plugin glm47 --world 2 --bus gloo
  dgpp serve --config glm47.json --rendezvous 0.0.0.0:29971   # waits for `dgpp rank` on the other hosts

\b
A flag goes before the deployment file, and that before the defaults. READY is printed when requests are taken.
Exit codes: 0 after Ctrl-C or SIGTERM; 1 nothing was served; 2 a wrong command line or configuration, or the engine
failed while serving, or a second signal cut the end short.
"""


@click.command(cls=GuardedCommand, epilog=EPILOG)
@model_options
@world_option
@click.option("--rendezvous", metavar="HOST:PORT", help="Listen there for ranks that are started with `dgpp rank`.")
@click.option("--epoch", type=click.IntRange(0), default=1, show_default=True, help="Which start of the world this is.")
@click.option("--relaunch", type=click.IntRange(0), default=0, help="Start again so many times where the engine fails.")
@bus_option
@log_dir_option
@offline_option
@service_options
@click.option("--no-image", is_flag=True, help="On a GPU, load the checkpoint itself and keep no resident image.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), help="Seed of requests that name none.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="Sampling default.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sampling default.")
@click.option("--top-k", type=click.IntRange(0), help="Sampling default; 0 is off.")
@click.option("--min-p", type=click.FloatRange(0, 1), help="Sampling default.")
@click.option("--repetition-penalty", type=click.FloatRange(0, min_open=True), help="Sampling default.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", help="Form of a log line.")
@capacity_options
def command(
    plugin: str | None,
    config: Path | None,
    checkpoint: str | None,
    rendezvous: str | None,
    epoch: int,
    relaunch: int,
    log_dir: str | None,
    offline: bool,
    no_image: bool,
    seed: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    repetition_penalty: float | None,
    log_format: LogFormat,
    **flags: object,
) -> None:
    """Serve a model over the OpenAI API."""
    host = load_plugins(environ=os.environ)
    for problem in host.problems:
        click.echo(f"warning: {problem.error().line()}", err=True)
    chosen = choose(host, os.environ, plugin=plugin, config=config, checkpoint=checkpoint, anywhere=False, **flags)
    warn_of_idle_keys(chosen.resolved)
    warn_of_hidden_keys(chosen.resolved, chosen.site, flags)
    set_up(log_format, chosen.site.log_level)
    sampling = SamplingOverrides(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty
    )
    image = not no_image and os.environ.get("DGPP_RESIDENT_CACHE") != "off"
    routes = [route for hooks in host.hooks("dgpp_routes") for route in hooks.routes()]

    def options(epoch: int) -> ServeOptions:
        """What the command line, the files that it names and the environment ask for now."""
        now = choose(host, os.environ, plugin=plugin, config=config, checkpoint=checkpoint, anywhere=False, **flags)
        world = world_options(now, rendezvous, epoch, log_dir)
        return serve_options(now, find_checkpoint(now, os.environ, offline), sampling, seed, image=image, world=world)

    from dgpp_core.server.supervisor import EXIT_FAILED, Stopping, run

    relaunching = Relaunch(options, epoch, relaunch, elsewhere=rendezvous is not None)
    while True:
        stopping = Stopping()
        status = run(relaunching.options, stopping=stopping, routes=routes)
        if status != EXIT_FAILED or stopping.asked.is_set() or not relaunching.again():
            click.get_current_context().exit(status)
