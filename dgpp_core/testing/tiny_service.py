"""A real service of a tiny model with random weights that calls tools: every part runs, in little time."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dgpp_core.checkpoint.synth import synthesise
from dgpp_core.host.loading import load_plugins
from dgpp_core.testing.fake_service import EOS, MARKERS, TOOL_TEMPLATE, write_checkpoint
from dgpp_core.testing.services import RunningService, serve_command, started
from dgpp_core.testing.tool_replies import dialect

MODEL = "tiny"


@contextlib.contextmanager
def tiny_service(plugin: str, *options: str) -> Iterator[RunningService]:
    """Serve the tiny form of ``plugin``'s model on the CPU as `MODEL`, with GLM's markers in its tokenizer.

    Args:
        options: further ones of ``dgpp serve``.

    Raises:
        EngineError: it ended before it was ready.
    """
    model = load_plugins(environ={}).model(plugin)
    config = {**model.spec.tiny_config, "eos_token_id": EOS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        synthesise(model.spec, model.bindings(model.read_config(config)), config, folder, seed=4, dtype="F32")
        (folder / "chat_template.jinja").unlink()
        write_checkpoint(folder, (*MARKERS, *dialect("glm").markers), TOOL_TEMPLATE)
        (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": EOS}))
        line = serve_command(plugin, "--checkpoint", name, "--device", "cpu", "--model-alias", MODEL, *options)
        # Products this small gain nothing from threads, which wait for each other where others compute too.
        with started(line, {"OMP_NUM_THREADS": "1"}) as service:
            yield service
