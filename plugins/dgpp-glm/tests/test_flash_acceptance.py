"""Drafts of GLM-5.3-Flash that stand, and some that do not: delta states, rings and index blocks follow them."""

from dgpp_core.testing import DraftConformance


class TestFlashDrafts(DraftConformance):
    """The kit's checks; rejected rows lie before, at and behind the ends of index blocks, of four tokens."""

    model = "glm53-flash"
    lengths = (22, 1, 13)
    cases = ((1, 0), (5, 0), (1, 3), (3, 4), (5, 3), (5, 4))
