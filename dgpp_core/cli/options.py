"""The options that several commands share. Types and ranges come from the settings structs themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from msgspec import inspect

from dgpp_core.config.fabric import WANTED
from dgpp_core.config.settings import EngineSettings, HttpSettings

F = TypeVar("F", bound=Callable[..., Any])

CAPACITY = {
    "max_concurrency": "Requests that run at once.",
    "kv_capacity": "Tokens that the KV pool holds.",
    "block_tokens": "Tokens a KV block.",
    "decode_context_parallel": "Ranks that divide KV blocks, where a model can; 1: each has all.",
    "kv_dtype": "Form of the cache, where a model has several.",
    "embed_sharding": "The embedding whole on every rank, or shared where a model can.",
    "queue_limit": "Requests that wait for a slot before the next gets a 503.",
    "max_connections": "Open HTTP connections.",
    "default_max_tokens": "Reply limit where a request names none.",
    "prefix_cache_gib": "GiB for snapshots of window and recurrent state; 0 turns prefix reuse off.",
    "prefix_min_tokens": "No snapshot of such state below this position.",
    "prefix_head_snapshots": "One at the end of a prompt's first message too.",
    "admission": "Reserve prompt and reply (full), or grow by a window at a time.",
    "admission_window": "Tokens reserved at a time under grow.",
    "prefill_budget_tokens": "Prompt tokens a tick while replies run; -1 automatic, 0 whole prompts.",
    "prefill_idle_budget_tokens": "The same while none runs; 0 uses the other.",
    "admission_gather_ms": "Milliseconds that an idle engine waits for company of its first request.",
    "prefill": "Rows of a prompt that go through every layer, where a model can do with less.",
    "ngram_table": "Keep a table of n-grams in memory, or read its rows from the checkpoint's files.",
    "dense_weights": "Keep dense matrices of the layers as they are, or in 8 bits where a model can.",
    "bf16_weights": "On a GPU, keep BF16 matrices as they are or in 12 bits a weight.",
    "mtp_depth": "Most tokens drafted a step.",
    "mtp_schedule": "Verify as many drafts as pay, by how sure the drafter is, or else how many stood lately.",
    "mtp_schedule_min_depth": "Fewest drafts that a step then verifies.",
    "mtp_schedule_base_ms": "What a step then is taken to cost, in ms.",
    "mtp_schedule_row_ms": "What a row of it then is taken to cost, in ms.",
    "mtp_schedule_lambda": "Where a drafter says how sure it is: tokens that a ms is worth at least; 0 derives it.",
    "mtp_schedule_adapt": "Where a drafter says how sure it is: let what a ms is worth follow what steps commit.",
    "mtp_schedule_sampled_scale": "Where a drafter says how sure it is: times this for replies whose tokens are drawn.",
    "pipeline": "On a GPU, launch the next step before the host has read the last one.",
    "decode_graph": "On a GPU, run decode steps from captured graphs.",
}
SERVICE = {
    "model_alias": "The served model id, where it is not the model's own.",
    "reasoning_in_content": "Leave reasoning in the text instead of a field of its own.",
    "no_eos": "Replies run to their limit (for measuring).",
    "bulk_pace_gbps": "Gbit/s that a rank sends each other one at most over RDMA; 0 no limit, below 0 derived.",
    "stats_interval_s": "Seconds between lines of statistics while there is work; 0 is off.",
    "rendezvous_timeout_ms": "Milliseconds for the other ranks to join.",
}
HTTP = {
    "max_body_bytes": "Largest request body.",
    "sse_ping_interval": "Seconds between keep-alive comments on a silent stream; -1 is off.",
    "api_key_file": "Hashed API keys (`dgpp key`), of which every request must show one.",
}
OWN_NAMES = {"max_body_bytes": "http-max-body-bytes"}


def model_options(command: F) -> F:
    """``--plugin``, ``--config``, ``--checkpoint``, ``--device``."""
    decorators = (
        click.option("--plugin", metavar="NAME", help="The model, by the name that `dgpp plugins list` shows."),
        click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="A deployment file (JSON)."),
        click.option("--checkpoint", metavar="DIR|ORG/NAME", help="Weights, where they are not the model's default."),
        click.option("--device", metavar="auto|cpu|cuda[:N]", help="Where to compute.  [default: auto]"),
    )
    return _apply(decorators, command)


offline_option = click.option("--offline", is_flag=True, envvar="HF_HUB_OFFLINE", help="Stay off the network.")


world_option = click.option(
    "--world", type=click.IntRange(1, 64), help="Ranks that share the model, all on this host.  [default: 1]"
)


bus_option = click.option(
    "--bus",
    type=click.Choice(WANTED),
    help="How ranks reach each other: shared memory (shm), RDMA (verbs), NCCL, TCP (gloo), or what fits (auto)."
    "  [default: the site's, auto]",
)


log_dir_option = click.option(
    "--log-dir",
    metavar="DIR",
    help="Where each of several ranks leaves its fault file.  [default: the site's, port-PORT in it]",
)


api_key_option = click.option(
    "--api-key",
    envvar="DGPP_API_KEY",
    default="",
    help="The key to show a service that wants one.  [env: DGPP_API_KEY]",
)


def capacity_options(command: F) -> F:
    """The engine's capacity, one option a key."""
    switches = (
        click.option("--no-mtp", is_flag=True, default=None, help="Do not draft."),
        click.option("--no-prefix-cache", is_flag=True, default=None, help="Reuse no prefixes."),
    )
    return _apply((*_from_struct(EngineSettings, CAPACITY), *switches), command)


def service_options(command: F) -> F:
    """How the service answers and where it listens."""
    where = (
        click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]"),
        click.option("--port", type=int, help="Port to listen on.  [default: 18080]"),
    )
    return _apply((*where, *_from_struct(HttpSettings, HTTP), *_from_struct(EngineSettings, SERVICE)), command)


def _apply(decorators: tuple[Callable[[F], F], ...], command: F) -> F:
    for decorator in reversed(decorators):
        command = decorator(command)
    return command


def _from_struct(kind: type, helps: dict[str, str]) -> tuple[Callable[[F], F], ...]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    fields = {field.name: field for field in info.fields}
    return tuple(_option(fields[name], text) for name, text in helps.items())


def _option(field: inspect.Field, text: str) -> Callable[[F], F]:
    """An option without a default of its own: what is not given is left to the deployment file."""
    flag = OWN_NAMES.get(field.name, field.name.replace("_", "-"))
    shown = field.default if field.default != "" else "none"
    match field.type:
        case inspect.BoolType():
            names = f"--{flag}" if flag.startswith("no-") else f"--{flag}/--no-{flag}"
            return click.option(names, field.name, is_flag=True, default=None, help=text)
        case inspect.LiteralType(values=values):
            choice = click.Choice([str(value) for value in values])
            return click.option(f"--{flag}", field.name, type=choice, help=f"{text}  [default: {shown}]")
        case inspect.StrType():
            return click.option(f"--{flag}", field.name, metavar="TEXT", help=f"{text}  [default: {shown}]")
        case kind:
            number = int if isinstance(kind, inspect.IntType) else float
            return click.option(f"--{flag}", field.name, type=number, help=f"{text}  [default: {shown}]")
