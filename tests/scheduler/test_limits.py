import itertools

import pytest

from dgpp_core.api.errors import ConfigError
from dgpp_core.scheduler.limits import Limits


def limits(**fields: object) -> Limits:
    return Limits(**({"slots": 1, "blocks": 10, "max_context": 100} | fields))


def touched(prompt: int, max_tokens: int, depth: int, lag: int, accepted: tuple[int, ...]) -> int:
    """Rows touched by a request whose n-th decode step accepts ``accepted[n]`` drafts, by playing it step by step."""
    rows, known, committed, launched, outstanding = prompt, 0, 1, 0, [1]
    most = prompt + max(0, depth - 1)
    while known < max_tokens:
        if len(outstanding) <= lag and len(outstanding) < max_tokens - known:
            drafts = min(depth, accepted[launched % len(accepted)])
            most = max(most, rows + depth + 1, rows + drafts + 1 + max(0, depth - 1))
            rows, committed, launched = rows + drafts + 1, committed + drafts + 1, launched + 1
            outstanding.append(drafts + 1)
            if len(outstanding) <= lag:
                continue
        known += outstanding.pop(0)
    return most


@pytest.mark.parametrize("depth", range(5))
def test_reserved_rows_are_the_most_that_any_run_of_accepted_drafts_touches(depth: int) -> None:
    for prompt, max_tokens in itertools.product((1, 5), range(2, 9)):
        reserved = limits(depth=depth).rows(prompt, max_tokens)
        for lag, accepted in itertools.product((0, 1), itertools.product(range(depth + 1), repeat=3)):
            assert touched(prompt, max_tokens, depth, lag, accepted) <= reserved
    assert touched(5, 3, depth, 1, (depth,)) == limits(depth=depth).rows(5, 3), "and no more than that"


def test_without_drafts_a_request_takes_no_row_more_than_it_needs() -> None:
    assert limits().rows(7, 5) == 7 + 5 - 1


@pytest.mark.parametrize("depth", range(4))
def test_pool_context_fits_and_one_token_more_does_not(depth: int) -> None:
    each = limits(depth=depth, blocks=5, block_tokens=8)
    assert each.blocks_for(each.rows(each.pool_context - 4, 4)) == 5
    assert each.blocks_for(each.rows(each.pool_context - 4, 5)) == 6


def test_a_table_is_as_long_as_the_longest_request_needs() -> None:
    assert limits(blocks=100, block_tokens=8, max_context=33).table_blocks == 4
    assert limits(blocks=3, block_tokens=8, max_context=33).table_blocks == 3


@pytest.mark.parametrize(
    "field", ["slots", "blocks", "block_tokens", "queue", "max_context", "depth", "prefill_budget"]
)
def test_an_impossible_limit_is_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        limits(**{field: -1})
    assert caught.value.where == field
    assert caught.value.found == "-1"
