"""The fixed sizes a scheduler plans within, and the arithmetic of rows that follows from them."""

from __future__ import annotations

from typing import Literal

import msgspec

from dgpp_core.api.errors import ConfigError


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler may hand out.

    Attributes:
        slots: requests that hold state at once.
        blocks: usable KV blocks, ids 1 .. ``blocks``; block 0 is the engine's scratch block and is never handed out.
        block_tokens: rows a block holds.
        snapshots: arena slots for window and recurrent state.
        needs_snapshot: the model has window or recurrent groups: a prefix is reusable only where a snapshot exists.
        snapshot_least: no snapshot below this position.
        snapshot_heads: whether a prompt's first message gets a snapshot of its own.
        decode_rows_match_prefill: a row that a decode step wrote has the bits a prefill would have given it. If not,
            only prefilled rows are kept for reuse, so that a reply does not depend on what happened to be cached.
        queue: requests that may be live beyond the slots; where blocks are short, some of those within wait as well.
        admission: ``full`` reserves a whole request, ``grow`` reserves `admission_window` tokens at a time.
        admission_window: tokens a ``grow`` reservation reaches past what is there.
        prefill_budget: prompt tokens a tick while requests decode; 0 is whole prompts.
        prefill_idle_budget: the same while nothing decodes; 0 is ``prefill_budget``.
        depth: most draft tokens a decode step verifies.
        ladder: depths to choose from by what pays, the last one `depth`; empty verifies `depth` always.
        confident: results say how sure the drafter is, and the choice goes by that; else by how many drafts stood.
        base_ms, row_ms: what a step and each row of it are taken to cost there.
        worth, adapt: see `dgpp_core.scheduler.confidence.ConfidentDepth`.
        sampled_scale: of how sure the drafter is, where a request's tokens are drawn.
        max_context: most tokens (prompt and reply) of one request.
        prefix_cache: whether prefixes are kept at all.
        prefill_tail: tokens at a prompt's end that no prefix may hold: their rows alone go through every layer, so a
            row of another prompt's end has not what they would read of it. 0 leaves out the last one, as always.
    """

    slots: int
    blocks: int
    block_tokens: int = 64
    snapshots: int = 0
    needs_snapshot: bool = False
    snapshot_least: int = 0
    snapshot_heads: bool = True
    decode_rows_match_prefill: bool = True
    queue: int = 64
    admission: Literal["full", "grow"] = "full"
    admission_window: int = 256
    prefill_budget: int = 256
    prefill_idle_budget: int = 0
    depth: int = 0
    ladder: tuple[int, ...] = ()
    base_ms: float = 28.0
    row_ms: float = 8.0
    confident: bool = False
    worth: float = 0.0
    adapt: bool = True
    sampled_scale: float = 1.0
    max_context: int
    prefix_cache: bool = True
    prefill_tail: int = 0

    def __post_init__(self) -> None:
        least = {"slots": 1, "blocks": 1, "block_tokens": 1, "queue": 1, "max_context": 2}
        zeros = ("snapshots", "snapshot_least", "admission_window", "prefill_budget", "prefill_idle_budget", "depth")
        for name, low in (least | dict.fromkeys(zeros, 0)).items():
            value = getattr(self, name)
            if value < low:
                raise ConfigError("a scheduler limit is too small", where=name, found=str(value), expected=f">= {low}")

        if self.ladder and (self.ladder[-1] != self.depth or tuple(sorted(set(self.ladder))) != self.ladder):
            expected = f"ascending depths up to {self.depth}"
            raise ConfigError("a ladder of depths is out of order", found=str(self.ladder), expected=expected)

    @property
    def step_width(self) -> int:
        """Most tokens one decode step commits."""
        return self.depth + 1

    @property
    def step_rows(self) -> int:
        """Rows from a request's committed end on that one decode step may write.

        ``step_width`` verified rows; a drafter that recurses writes ``depth - 1`` provisional rows past those.
        """
        return self.step_width + max(0, self.depth - 1)

    @property
    def cache_on(self) -> bool:
        """Whether any prefix could ever be reused."""
        return self.prefix_cache and (self.snapshots > 0 or not self.needs_snapshot)

    @property
    def reads_first(self) -> bool:
        """Whether the next step's depth turns on the newest result, so that none may be launched before it is read."""
        return len(self.ladder) > 1 and self.confident

    def rows(self, prompt: int, max_tokens: int) -> int:
        """Most rows a request ever writes.

        A step is launched while another is outstanding only if that one cannot be the last: then at most
        ``max_tokens - 2`` tokens are known, the outstanding step adds ``step_width``, and the new one writes
        ``step_rows`` from there on. The row of the newest token is written by the step after it, hence one less.
        Without drafts this is ``prompt + max_tokens - 1``.
        """
        return prompt + max_tokens - 3 + self.step_width + self.step_rows

    def blocks_for(self, rows: int) -> int:
        """Blocks that ``rows`` rows take."""
        return -(-rows // self.block_tokens)

    @property
    def pool_context(self) -> int:
        """Most tokens (prompt and reply) a request alone in the pool can have."""
        return self.blocks * self.block_tokens - self.rows(0, 0)

    @property
    def table_blocks(self) -> int:
        """Longest block table of one slot."""
        return min(self.blocks, self.blocks_for(self.rows(0, self.max_context)))
