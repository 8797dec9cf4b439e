"""A whole service without a model: a small checkpoint, and `serve` over the fake engine, in a process of its own.

What is measured or tried on it is the front end: HTTP, templates, tokens, grammars, events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dgpp_core.config.settings import HttpSettings
from dgpp_core.server.options import ServeOptions
from dgpp_core.testing.fake_worker import FakeScript
from dgpp_core.testing.services import RunningService, started

SPECIALS = ("<|im_start|>", "<|im_end|>")
EOS = 1
"""The id of the second special token, which ends a turn."""
MARKERS = ("<think>", "</think>")
TEMPLATE = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}"
    "<|im_start|>assistant\n{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"
)
TOOL_TEMPLATE = (
    "{%- for tool in tools or [] -%}<|im_start|>tool\n{{ tool | tojson }}<|im_end|>\n{%- endfor -%}"
    "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
    "{%- if message.reasoning_content -%}<think>{{ message.reasoning_content }}</think>{%- endif -%}"
    "{{ message.content }}{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function.name }}"
    "{%- for key, value in call.function.arguments | items -%}<arg_key>{{ key }}</arg_key><arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{%- endfor -%}</tool_call>{%- endfor -%}"
    "<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
)
"""A chat template that shows tools, and calls in GLM's form."""
CORPUS = (
    "Red, yellow and blue are the three primary colors of paint; every other one can be mixed from them.",
    "The quick brown fox jumps over the lazy dog, and the User: says so. Überraschung für 世界 und 안녕 🧑‍💻!",
    "I think about it first. Then I answer in a few words, as a helpful assistant should.",
)
MODEL = "fake"
_TOKENS = 400


def write_checkpoint(folder: Path, markers: Sequence[str] = MARKERS, template: str = TEMPLATE) -> Path:
    """Write a byte-level tokenizer of a few hundred tokens, a chat template and generation defaults.

    Args:
        markers: added tokens, such as those of reasoning and calls.

    Returns:
        ``folder``.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_TOKENS, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIALS[EOS], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    defaults = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": EOS}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


@contextlib.contextmanager
def fake_service(
    script: FakeScript, *, max_connections: int = 256, markers: Sequence[str] = MARKERS, template: str = TEMPLATE
) -> Iterator[RunningService]:
    """Serve ``script`` on a free port of the loopback for as long as the block runs.

    Raises:
        EngineError: it ended before it was ready.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = write_checkpoint(Path(name), markers, template)
        (folder / "script.json").write_bytes(msgspec.json.encode(script))
        line = [sys.executable, "-m", __spec__.name, "--folder", name, "--max-connections", str(max_connections)]
        with started(line) as service:
            yield service


def main() -> int:
    """Serve what stands in a folder until a signal comes."""
    from dgpp_core.server.supervisor import run

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--max-connections", type=int, required=True)
    arguments = parser.parse_args()
    file = arguments.folder / "script.json"
    script = msgspec.json.decode(file.read_bytes(), type=FakeScript)
    options = ServeOptions(
        model=MODEL,
        served_id=MODEL,
        checkpoint=str(arguments.folder),
        settings=b"{}",
        slots=script.slots,
        max_connections=arguments.max_connections,
        http=HttpSettings(port=0),
    )
    return run(
        options,
        worker_module="dgpp_core.testing.fake_worker",
        worker_arguments=("--script", str(file)),
        on_ready=lambda url, _: print(f"READY {url}", flush=True),
    )


if __name__ == "__main__":
    sys.exit(main())
