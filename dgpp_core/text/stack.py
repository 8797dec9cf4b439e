"""Everything the front end knows about a checkpoint's text."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import msgspec

from dgpp_core.api.spec import Dialect
from dgpp_core.text.defaults import GenerationDefaults, read_generation_defaults
from dgpp_core.text.prompts import PromptTokens
from dgpp_core.text.switches import Switches, find_switches
from dgpp_core.text.template import ChatTemplate
from dgpp_core.text.tokenizer import Tokenizer
from dgpp_core.text.tools.detect import detect_dialect
from dgpp_core.text.tools.dialect import ToolDialect
from dgpp_core.text.turns import turn_marks

USUAL_MARKERS = ("<think>", "</think>")


class TextStack(msgspec.Struct, frozen=True):
    """What `load_text` found.

    Attributes:
        prompts: tokenizes what the template renders.
        template: None where neither checkpoint nor family has one; then there is no chat, only completions.
        reasoning: the texts that open and close reasoning, or None.
        switches: the reasoning controls that the template acts on.
        tools: how the model writes tool calls, or None where it is not known.
    """

    tokenizer: Tokenizer
    prompts: PromptTokens
    template: ChatTemplate | None
    reasoning: tuple[str, str] | None
    defaults: GenerationDefaults
    switches: Switches
    tools: ToolDialect | None = None


def load_text(
    folder: Path,
    dialect: Dialect | None,
    *,
    config_eos: tuple[int, ...],
    clock: Callable[[], datetime] | None = None,
) -> TextStack:
    """Tokenizer, chat template and defaults of the checkpoint in ``folder``.

    The checkpoint's template goes before the dialect's. A dialect's markers go before the usual ones, which count
    only where both are added tokens.

    Args:
        config_eos: end ids of config.json.
        clock: the time that a template may ask for.

    Raises:
        TokenizerError: the tokenizer or the template cannot be loaded.
        ConfigError: generation_config.json is malformed.
    """
    dialect = dialect or Dialect()
    tokenizer = Tokenizer.load(folder)
    template = _template(tokenizer, dialect, clock)
    reasoning = dialect.reasoning
    if reasoning is None and all(map(tokenizer.is_added, USUAL_MARKERS)):
        reasoning = USUAL_MARKERS
    return TextStack(
        tokenizer=tokenizer,
        prompts=PromptTokens(tokenizer, turn_marks(template, tokenizer) if template is not None else ()),
        template=template,
        reasoning=reasoning,
        defaults=read_generation_defaults(folder, config_eos),
        switches=find_switches(template, dialect.thinking_switches) if template is not None else Switches(),
        tools=detect_dialect(tokenizer.is_added, template),
    )


def starts_in_reasoning(prompt: str, reasoning: tuple[str, str] | None) -> bool:
    """Whether a rendered prompt ends in the opening marker, or that and a newline: then the reply starts inside."""
    return reasoning is not None and prompt.removesuffix("\n").endswith(reasoning[0])


def _template(tokenizer: Tokenizer, dialect: Dialect, clock: Callable[[], datetime] | None) -> ChatTemplate | None:
    if tokenizer.chat_template is not None:
        source, name = tokenizer.chat_template, tokenizer.chat_template_file
    elif dialect.chat_template is not None:
        source, name = dialect.chat_template, "the model family's chat template"
    else:
        return None
    return ChatTemplate(source, tokenizer.special_tokens, clock=clock, name=name)
