"""Request bodies to jobs: everything that a client can get wrong is found here, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dgpp_core.api.errors import RequestError
from dgpp_core.images.picture import Picture
from dgpp_core.server.attachments import attach
from dgpp_core.server.call_order import check_results, in_call_order
from dgpp_core.server.held import held_schema, held_to, start_of, within_budget
from dgpp_core.server.job import (
    Job,
    check_model,
    check_stream_options,
    job_from,
    refuse,
    sampling,
    unsupported,
)
from dgpp_core.server.parse import parse_body, read_fields, shorten
from dgpp_core.server.reasoning import template_variables
from dgpp_core.server.requests import (
    LEGACY_REFUSED,
    REFUSED_IF_PRESENT,
    REFUSED_IF_SET,
    ChatRequest,
    CompletionRequest,
)
from dgpp_core.server.served import Served
from dgpp_core.server.sight import Placed, Shown, place, show
from dgpp_core.server.tools import ToolUse, read_tools
from dgpp_core.text.messages import normalise_messages
from dgpp_core.text.stack import starts_in_reasoning

Prepare = Callable[[bytes, Served], Job]


def prepare_chat(body: bytes, served: Served) -> Job:
    """A chat request, validated, rendered and tokenized.

    Raises:
        RequestError: whatever is wrong with it.
    """
    raw = parse_body(body)
    check_model(raw, served)
    refuse(raw, REFUSED_IF_PRESENT, REFUSED_IF_SET)
    check_stream_options(raw)
    request = read_fields(raw, ChatRequest)
    _check_extras(request)
    return chat_job(request, served)


def chat_job(request: ChatRequest, served: Served) -> Job:
    """The job of a chat request whose fields are checked one by one: every dialect of conversations ends up here.

    Raises:
        RequestError: whatever is wrong with it.
    """
    limit = _token_limit(request)
    logprobs = _chat_logprobs(request)
    n = _choices(request, served)
    params = sampling(request, served)
    use = read_tools(request, served.text.tools, served.text.template, constrained=served.constrained)
    schema = held_schema(request, served)
    shown, pictures = _render(request, use, served)
    inside = starts_in_reasoning(shown.text, served.text.reasoning)
    prompt = _tokens(shown, pictures, served)
    job = job_from(request, served, params, prompt.ids, limit, prompt_field="messages")
    start = start_of(shown.text, inside, served)
    held = held_to(schema, use.rules, start, request.tools or (), served)
    return msgspec.structs.replace(
        job,
        turns=prompt.turns,
        pictures=prompt.pictures,
        logprobs=logprobs,
        n=n,
        in_reasoning=inside,
        splits_reasoning=True,
        grammar=within_budget(held, request.thinking_budget, start, served),
        calls=use.rules,
        obfuscate=request.stream_options is None or request.stream_options.include_obfuscation is not False,
        tier=request.service_tier is not None,
        metadata=request.metadata,
    )


def chat_tokens(request: ChatRequest, served: Served) -> list[int]:
    """The prompt of ``request``.

    Raises:
        RequestError: it has none.
    """
    use = read_tools(request, served.text.tools, served.text.template, constrained=served.constrained)
    return _tokens(*_render(request, use, served), served).ids


def prepare_completion(body: bytes, served: Served) -> Job:
    """A legacy completion request, validated and tokenized.

    Raises:
        RequestError: whatever is wrong with it.
    """
    raw = parse_body(body)
    check_model(raw, served)
    refuse(raw, (), LEGACY_REFUSED)
    check_stream_options(raw)
    request = read_fields(raw, CompletionRequest)
    params = sampling(request, served)
    tokens = served.text.tokenizer.encode_prompt(request.prompt)
    job = job_from(request, served, params, tokens, request.max_tokens, prompt_field="prompt")
    return msgspec.structs.replace(job, logprobs=-1 if request.logprobs is None else request.logprobs)


def _tokens(shown: Shown, pictures: tuple[Picture, ...], served: Served) -> Placed:
    prompt = served.text.prompts.encode(shown.text)
    return place(prompt.ids, prompt.turns, shown, pictures, served.sight)


def _render(request: ChatRequest, use: ToolUse, served: Served) -> tuple[Shown, tuple[Picture, ...]]:
    template = served.text.template
    if template is None:
        raise RequestError(
            "this model has no chat template",
            param="messages",
            hint="use /v1/completions with a prompt of your own, or put the release's chat_template.jinja into the "
            "checkpoint's folder",
        )
    variables = template_variables(
        request.reasoning_effort,
        request.chat_template_kwargs,
        efforts=served.efforts,
        variables=template.variables,
        switches=served.text.switches.thinking,
    )
    ordered, moved = in_call_order(request.messages)
    with moved.renamed():
        attached = attach(ordered, served.sight, served.files)
        messages = normalise_messages(attached.messages, template)
        check_results(ordered)
    shown = show(
        lambda messages, tools: template.render(messages, tools=tools, kwargs=variables),
        messages, use.shown, len(attached.pictures), served.sight,
    )  # fmt: skip
    return shown, attached.pictures


def _token_limit(request: ChatRequest) -> int | None:
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise RequestError("`max_tokens` and `max_completion_tokens` are two names of one limit", param="max_tokens")
    return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens


def _chat_logprobs(request: ChatRequest) -> int:
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else -1


def _choices(request: ChatRequest, served: Served) -> int:
    n = request.n or 1
    room = served.options.queue_limit + served.options.slots
    if n > room:
        raise RequestError(f"`n`: {n} choices can never be served at once; at most {room} can", param="n")
    return n


def _check_extras(request: ChatRequest) -> None:
    if request.store:
        raise RequestError("`store`: nothing is stored here", param="store", code="invalid_parameter")
    if request.modalities is not None and request.modalities != ["text"]:
        what = f'`modalities`: only ["text"] is supported, found {shorten(request.modalities)}'
        raise unsupported("modalities", what)
