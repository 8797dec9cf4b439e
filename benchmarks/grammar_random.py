"""Random schemas and replies written by chance through their masks, judged by jsonschema.

    python benchmarks/grammar_random.py --runs 2000

Prints how many replies were complete and each one that does not conform; the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from dgpp_core.testing.grammars import random_schema, validate, write
from dgpp_core.testing.reports import report_json
from dgpp_core.text.grammar import sources
from dgpp_core.text.grammar.matcher import Matcher
from dgpp_core.text.grammar.sources import GrammarError
from dgpp_core.text.grammar.spec import Grammar
from dgpp_core.text.grammar.vocabulary import Vocabulary

END = 256
PIECES = [*(bytes([byte]) for byte in range(256)), b"<end>", b'{"', b'":', b'", "', b'"}', b"}\n", b"true", b"12"]


def run(vocabulary: Vocabulary, seed: int) -> str:
    """What became of one schema: ``valid``, ``invalid``, ``endless``, or why there is no grammar."""
    schema = random_schema(random.Random(seed))
    source = sources.json_schema(schema)
    try:
        matcher = Matcher(Grammar(source=source, ends=(END,)), vocabulary, vocabulary.parser(source))
    except GrammarError:
        return "nothing conforms"
    written = write(matcher, vocabulary, [END], random.Random(seed))
    if written is None:
        return "endless"
    text = b"".join(vocabulary.pieces[token] for token in written)
    try:
        validate(schema, text)
    except Exception as error:
        print(f"seed {seed}: {schema}\n  {text!r}\n  {error}")
        return "invalid"
    return "valid"


def main() -> int:
    """Run and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    vocabulary = Vocabulary(PIECES, frozenset({END}), frozenset(), len(PIECES), END)
    counts = Counter(run(vocabulary, seed) for seed in range(options.first, options.first + options.runs))
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    if options.out is not None:
        report_json(sys.argv, {"runs": options.runs, "found": counts}, options.out)
    return int(counts["invalid"] > 0)


if __name__ == "__main__":
    sys.exit(main())
