"""A small vocabulary of bytes and pieces of JSON, with control tokens."""

from __future__ import annotations

import pytest

from dgpp_core.text.grammar.vocabulary import Vocabulary

PIECES = [
    *(bytes([byte]) for byte in range(256)),
    b"<end>", b"<turn>", b"<think>", b"</think>", b"<call>", b"</call>",
    b'{"', b'":', b'": ', b', "', b'"}', b"}\n", b' {"', b"\n\n", b"  ", b"true", b"false", b"null", b"12", b"0.",
    b"e1", b"[]", b"],", b"]}", b'["', b"\\n", b"\\u00", "é".encode(), "世".encode(), "世".encode()[:2],
    "🙂".encode()[2:], b"name", b"th", b"</th", b"ink>", b"nk>x", b"k>\n", b"2024-02-", b"ab", b"abc", b"<", b"</",
]  # fmt: skip
END, TURN, THINK, END_THINK, CALL, END_CALL = range(256, 262)
CONTROL = frozenset({END, TURN, THINK, END_THINK, CALL, END_CALL})
WIDTH = 320
"""More rows than tokens, as models have."""


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(PIECES, CONTROL, frozenset({END, TURN}), WIDTH, END)
