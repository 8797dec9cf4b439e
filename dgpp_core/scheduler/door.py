"""The second line of the door: what no request may ask of the scheduler. The front end refuses the same earlier."""

from __future__ import annotations

from dgpp_core.images.picture import misplaced
from dgpp_core.scheduler.limits import Limits
from dgpp_core.scheduler.messages import Submit


def refusal(limits: Limits, submit: Submit, live: int) -> str:
    """Why a request cannot be accepted, empty where it can.

    Args:
        limits: what may be handed out.
        submit: the request.
        live: requests that run or wait. The bound is on both together: which of them already run depends on the tick.
    """
    prompt, reply = len(submit.tokens), submit.max_tokens
    if not prompt:
        return "the prompt has no tokens"
    if wrong := misplaced(prompt, submit.pictures):
        return wrong
    if reply < 1:
        return f"max_tokens is {reply}; at least 1 is needed"
    if prompt + reply > limits.max_context:
        return f"{prompt} prompt tokens and {reply} to generate exceed the context of {limits.max_context} tokens"
    need = limits.blocks_for(limits.rows(prompt, reply))
    if need > limits.blocks:
        return f"{prompt} prompt tokens and {reply} to generate need {need} KV blocks; the pool has {limits.blocks}"
    if live >= limits.slots + limits.queue:
        return f"{live} requests run or wait, which is the limit"
    return ""
