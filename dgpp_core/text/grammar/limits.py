"""What one grammar may cost, so that none holds the others up."""

from __future__ import annotations

import llguidance

COMPILE_SECONDS = 3.0
"""Time to compile and try a grammar."""

COMPILE_BYTES = 2 << 30
"""Address space of the process that tries grammars."""

MAX_SOURCE = 2_000_000
"""Characters of a source."""


PROBE_STEPS = 64
"""Bytes of the reply that a grammar is tried with."""

REMEMBERED = 32
"""Grammars that are kept compiled."""

MAX_ALTERNATIVES = 20_000
"""Ways to go on that a parser keeps open at once; a list of optional properties takes four a property."""


def limits(max_alternatives: int = MAX_ALTERNATIVES) -> llguidance.LLParserLimits:
    """The library's limits: counts of work, so that a grammar fails at the same token on every rank."""
    return llguidance.LLParserLimits(
        max_items_in_row=max_alternatives,
        step_max_items=100_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )
