"""Drafts of Qwen3.8-Flash-Next that stand, and some that do not: delta states, rings and index blocks follow them."""

from dgpp_core.testing import DraftConformance


class TestFlashNextDrafts(DraftConformance):
    """The kit's checks; rejected rows lie before, at and behind the ends of index blocks, of four tokens."""

    model = "qwen38-flash-next"
    lengths = (22, 1, 13)
    cases = ((1, 0), (4, 0), (3, 3), (4, 4))
