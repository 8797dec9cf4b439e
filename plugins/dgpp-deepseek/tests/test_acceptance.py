"""Drafts of DeepSeek-V4.1-Flash that stand, past the end of the window of 16 rows."""

from dgpp_core.testing import DraftConformance


class TestDeepseek41Drafts(DraftConformance):
    """The kit's checks; rejected rows were written into rings and into halves of entries."""

    model = "deepseek41-flash"
    lengths = (21, 1, 18)
    reply_tokens = 17
    cases = ((5, 0), (5, 4), (2, 3))
