"""``dgpp chat``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import click

from dgpp_core.api.errors import DgppError, EngineError
from dgpp_core.cli.client import Client, Message, request_body
from dgpp_core.cli.command import GuardedCommand, json_option, print_json, report
from dgpp_core.cli.options import api_key_option, model_options, offline_option
from dgpp_core.host.child import module_command

EPILOG = """\b
Examples:
  dgpp chat                                  # with the service on 127.0.0.1:18080
  dgpp chat --url http://spark-0:18080 --system "Answer briefly."
  dgpp chat --plugin smollm2                 # starts a service for the time of the chat
  dgpp chat --message "Name three primary colors." --temperature 0

\b
In a chat: /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C stops a reply.
"""
LEAVE_S = 60.0


@click.command(cls=GuardedCommand, epilog=EPILOG)
@click.option("--url", help="The service.  [default: http://127.0.0.1:18080]")
@click.option("--message", "-m", metavar="TEXT", help="Ask once, print the reply, leave.")
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--temperature", type=float, help="Sampling temperature.  [default: the service's]")
@click.option("--seed", type=int, help="Seed of every reply.")
@click.option("--max-tokens", type=int, help="Reply limit in tokens.  [default: the service's]")
@api_key_option
@json_option
@model_options
@offline_option
def command(
    url: str | None,
    message: str | None,
    system: str | None,
    temperature: float | None,
    seed: int | None,
    max_tokens: int | None,
    api_key: str,
    as_json: bool,
    offline: bool,
    **model: Any,
) -> None:
    """Talk to a model in the terminal."""
    options = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    start = [f"--{name}={value}" for name, value in model.items() if value is not None]
    if start and url is not None:
        raise click.UsageError("--url names a running service; --plugin, --config and --checkpoint start one.")
    if as_json and message is None:
        raise click.UsageError("--json goes with --message.")
    with service([*start, *(["--offline"] if offline else [])]) if start else running(url, api_key) as client:
        chat = Chat(client, system, options)
        if message is None:
            chat.converse()
        elif as_json:
            print_json(client.complete(chat.body(message)))
        else:
            chat.ask(message)


@contextlib.contextmanager
def running(url: str | None, key: str) -> Iterator[Client]:
    """A service that runs already."""
    yield Client(url or "http://127.0.0.1:18080", key=key)


@contextlib.contextmanager
def service(arguments: list[str]) -> Iterator[Client]:
    """A service of our own, ended with the block.

    Raises:
        EngineError: it ended before it was ready; what it said is on stderr.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    line = module_command("dgpp_core.cli", "serve", *arguments, f"--port={port}", "--host=127.0.0.1")
    line.append("--api-key-file=")  # the site's keys are for others
    quiet = {"DGPP_LOG_LEVEL": "warn", **os.environ}
    # A session of its own keeps Ctrl-C, which stops a reply, from stopping the service.
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=quiet, start_new_session=True)
    try:
        assert process.stdout is not None
        if not any(line.startswith("READY") for line in process.stdout):
            raise EngineError("the service did not start", found=f"exit status {process.wait()}", hint="see above")
        yield Client(f"http://127.0.0.1:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()


class Chat:
    """One conversation.

    Args:
        options: request fields; None leaves one to the service.
    """

    def __init__(self, client: Client, system: str | None, options: dict[str, Any]) -> None:
        self._client, self._options = client, options
        self._model = client.model()
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = list(self._opening)

    def body(self, text: str) -> dict[str, Any]:
        """The request that asks ``text`` next."""
        return request_body(self._model, [*self.messages, {"role": "user", "content": text}], self._options)

    def ask(self, text: str) -> None:
        """Print the reply as it comes and remember both."""
        parts: list[str] = []
        with contextlib.closing(self._client.stream(self.body(text))) as pieces:
            for piece in pieces:
                if piece.reasoning:
                    click.secho(piece.reasoning, dim=True, nl=False, err=True)
                click.echo(piece.text, nl=False)
                parts.append(piece.text)
                if piece.finish == "length":
                    click.secho(" [cut off at the token limit]", dim=True, nl=False, err=True)
        click.echo()
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(parts)}]

    def converse(self) -> None:
        """Ask what is typed until the end of input."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its editing keys)
        click.echo(f"{self._model} at {self._client.url}; /reset, /exit", err=True)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                return
            if text == "/exit":
                return
            if text == "/reset":
                self.messages = list(self._opening)
                click.echo("[what was said is forgotten]", err=True)
            elif text == "/help":
                click.echo("/reset forgets what was said, /exit leaves; all else is sent", err=True)
            elif text:
                self._turn(text)

    def _turn(self, text: str) -> None:
        try:
            self.ask(text)
        except KeyboardInterrupt:
            click.echo("\n[stopped]", err=True)
        except DgppError as error:
            report(error, as_json=False)
