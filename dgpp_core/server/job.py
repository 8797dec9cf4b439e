"""A validated generation request, and the way there that both routes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.images.picture import Picture
from dgpp_core.sampling.params import SamplingParams
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import GenerationRequest
from dgpp_core.server.served import Served
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.tools.rules import CallRules

MAX_ID_DIGITS = 12
STREAM_MEMBERS = ("include_usage", "include_obfuscation")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be generated and how it is to be sent. Nothing about it can be refused but for want of room.

    Attributes:
        tokens: the prompt.
        turns: positions in it at which a message is over, ascending.
        pictures: images in it, in the order of their places.
        max_tokens: per choice.
        params: of choice 0; choice k's seed is k more. ``seeded`` is False where the seed is still to be drawn.
        logprobs: alternatives a token, -1 for none at all.
        n: choices.
        in_reasoning: the prompt ends inside reasoning.
        splits_reasoning: whether the reply's reasoning markers are looked for.
        grammar: what the reply is held to, if anything.
        calls: which tool calls the reply may have; None where calls are text like any other.
        ping_s: silence in seconds after which a stream gets a keep-alive comment.
        tier: the answer names its service tier.
        echo: what the dialect's answer repeats of its request.
    """

    tokens: tuple[int, ...]
    turns: tuple[int, ...] = ()
    pictures: tuple[Picture, ...] = ()
    max_tokens: int
    params: SamplingParams
    seeded: bool
    logprobs: int = -1
    n: int = 1
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    use_cache: bool = True
    in_reasoning: bool = False
    splits_reasoning: bool = False
    grammar: Grammar | None = None
    calls: CallRules | None = None
    stream: bool = False
    include_usage: bool = False
    obfuscate: bool = False
    ping_s: float | None = None
    tier: bool = False
    metadata: dict[str, str] | None = None
    echo: msgspec.Struct | None = None


def check_model(raw: dict[str, Any], served: Served) -> None:
    """`model` must name the served model; this is checked before anything else.

    Raises:
        RequestError: 400 without it, 404 for another.
    """
    model = raw.get("model")
    if not isinstance(model, str):
        found = f"found {shorten(model)}" if "model" in raw else "but it is missing"
        raise RequestError(f"`model`: expected a string, {found}", param="model")
    if model != served.options.served_id:
        raise model_not_found(model, served)


def model_not_found(model: str, served: Served) -> RequestError:
    """404 for an id that is not served."""
    return RequestError(
        f"the model {shorten(model)} is not served here; {shorten(served.options.served_id)} is",
        status=404,
        param="model",
        code="model_not_found",
    )


def refuse(raw: dict[str, Any], if_present: Sequence[str], if_set: Sequence[str]) -> None:
    """Refuse features that are not offered.

    Raises:
        RequestError: 400 `unsupported_parameter`.
    """
    for name in (*if_present, *if_set):
        if name in raw and (name in if_present or raw[name] is not None):
            raise unsupported(name, f"`{name}` is not supported")


def unsupported(param: str, what: str, hint: str = "") -> RequestError:
    """400 for a known feature that is not offered."""
    return RequestError(what, param=param, code="unsupported_parameter", hint=hint)


def check_stream_options(raw: dict[str, Any], members: Sequence[str] = STREAM_MEMBERS) -> None:
    """`stream_options` needs `stream` and may have known ``members`` only; so does `sse_ping_interval`.

    Raises:
        RequestError: 400.
    """
    options = raw.get("stream_options")
    if options is not None and not isinstance(options, dict):
        what = f"`stream_options`: expected an object, found {shorten(options)}"
        raise RequestError(what, param="stream_options")
    for name in options or ():
        if name not in members:
            raise unsupported(f"stream_options.{name}", f"`stream_options.{name}` is not supported")
    for name in ("stream_options", "sse_ping_interval"):
        if raw.get(name) is not None and raw.get("stream") is not True:
            raise RequestError(f"`{name}` is only allowed with `stream: true`", param=name)
    if raw.get("sse_ping_interval") == 0:
        raise RequestError("`sse_ping_interval`: expected -1 (off) or at least 1, found 0", param="sse_ping_interval")


def sampling(request: GenerationRequest, served: Served) -> tuple[SamplingParams, bool]:
    """Sampling parameters of ``request`` over the model's defaults, and whether their seed is the final one."""

    def pick(name: str) -> Any:
        value = getattr(request, name)
        return getattr(served.defaults, name) if value is None else value

    top_p, top_k = pick("top_p"), pick("top_k")
    if top_p == 0:
        top_p, top_k = 1.0, 1
    seed = request.seed if request.seed is not None else served.options.seed
    params = SamplingParams(
        temperature=pick("temperature"),
        top_p=top_p,
        top_k=top_k,
        min_p=pick("min_p"),
        repetition_penalty=pick("repetition_penalty"),
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        seed=(seed or 0) % 2**64,
        logit_bias=_logit_bias(request.logit_bias or {}, served.ready.vocab_size),
    )
    return params, seed is not None


def _logit_bias(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    found: dict[int, float] = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS and int(key) < vocab_size):
            raise RequestError(
                f"`logit_bias`: {shorten(key)} is no token id; ids are decimal numbers below {vocab_size}",
                param="logit_bias",
            )
        if int(key) in found:
            raise RequestError(f"`logit_bias`: the id {int(key)} is given twice", param="logit_bias")
        found[int(key)] = bias
    return tuple(sorted(found.items()))


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a request."""
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def ping_interval(request: GenerationRequest, served: Served) -> float | None:
    """Seconds of silence before a keep-alive comment, None for never."""
    own = request.sse_ping_interval
    seconds = served.options.http.sse_ping_interval if isinstance(own, msgspec.UnsetType) else own
    return None if seconds == -1 else float(seconds)


def reply_limit(prompt_tokens: int, asked: int | None, served: Served) -> int:
    """Tokens that the reply may have. The default shrinks to what fits; a limit that was asked for does not.

    Raises:
        RequestError: 400 `context_length_exceeded` with the numbers.
    """
    context = served.ready.context_tokens
    wanted = min(served.options.default_max_tokens, max(context - prompt_tokens, 1)) if asked is None else asked
    if prompt_tokens + wanted > context:
        raise RequestError(
            f"this model's context is {context} tokens, but {prompt_tokens + wanted} are needed: {prompt_tokens} in "
            f"the prompt and {wanted} for the reply",
            param="max_tokens",
            code="context_length_exceeded",
            hint="shorten the prompt or lower max_tokens",
        )
    return wanted


def job_from(
    request: GenerationRequest,
    served: Served,
    drawn: tuple[SamplingParams, bool],
    prompt: Sequence[int],
    asked: int | None,
    *,
    prompt_field: str,
) -> Job:
    """The parts of a job that both routes have in common; ``drawn`` is what `sampling` gave.

    Raises:
        RequestError: 400, the prompt is empty or does not fit.
    """
    if not prompt:
        raise RequestError("the prompt has no tokens", param=prompt_field)
    params, seeded = drawn
    options = request.stream_options
    return Job(
        tokens=tuple(prompt),
        max_tokens=reply_limit(len(prompt), asked, served),
        params=params,
        seeded=seeded,
        stops=stop_strings(request.stop),
        ignore_eos=request.ignore_eos or served.options.no_eos,
        use_cache=request.prefix_cache,
        stream=bool(request.stream),
        include_usage=options is not None and bool(options.include_usage),
        ping_s=ping_interval(request, served),
    )
