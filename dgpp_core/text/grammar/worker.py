"""The process that tries grammars: ``python -m dgpp_core.text.grammar.worker``, frames on stdin and stdout.

A grammar comes from a client and may take any time and memory. Here it may: whoever asked kills this process and
starts another. The vocabulary is that of single bytes and control tokens, which compiles what the whole one does.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import sys

import llguidance
import msgspec
import numpy as np

from dgpp_core.text.grammar.frames import Tokens, Verdict, read_frame, write_frame
from dgpp_core.text.grammar.limits import COMPILE_BYTES, PROBE_STEPS
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.vocabulary import Vocabulary, clear, reason


def small_vocabulary(tokens: Tokens) -> Vocabulary:
    """Control tokens at their ids, and the single bytes at the first ids that are free."""
    pieces = [b""] * tokens.width
    for number, piece in tokens.control.items():
        pieces[number] = piece
    free = (number for number in range(tokens.width) if number not in tokens.control and number != tokens.end)
    for byte, number in zip(range(256), free, strict=False):
        pieces[number] = bytes([byte])
    return Vocabulary(pieces, frozenset(tokens.control) | {tokens.end}, frozenset(), tokens.width, tokens.end)


def judge(vocabulary: Vocabulary, source: str) -> Verdict:
    """Compile ``source`` and walk a little way along it."""
    try:
        parser = vocabulary.parser(source).deep_copy()
        _probe(vocabulary, parser)
    except GrammarError as error:
        return Verdict(str(error))
    return Verdict()


def _probe(vocabulary: Vocabulary, parser: llguidance.LLMatcher) -> None:
    """A reply by chance, the same each time: limits that are passed at once, and grammars without a text."""
    rng = random.Random(0)
    (mask,) = vocabulary.empty(1)
    for _ in range(PROBE_STEPS):
        parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if parser.is_error():
            raise GrammarError(reason(parser))
        clear(mask, vocabulary.end)
        following = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(following):
            if not parser.is_accepting():
                raise GrammarError("it matches no text")
            return
        parser.consume_token(int(rng.choice(following)))


def main() -> int:
    """Answer every source until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (COMPILE_BYTES, COMPILE_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(5)  # nobody's stream waits for a grammar
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return 0
    vocabulary = small_vocabulary(msgspec.msgpack.decode(first, type=Tokens))
    write_frame(sink, Verdict())
    while (frame := read_frame(source)) is not None:
        write_frame(sink, judge(vocabulary, msgspec.msgpack.decode(frame, type=str)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
