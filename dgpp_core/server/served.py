"""What this service serves: the model as requests and `/v1/models` see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.config.settings import EngineSettings, FileInputs
from dgpp_core.scheduler.messages import Ready
from dgpp_core.server.files import Files
from dgpp_core.server.options import ServeOptions
from dgpp_core.server.reasoning import effort_mapping
from dgpp_core.server.sight import Sight, sight_of
from dgpp_core.text.grammar.blame import refused_path
from dgpp_core.text.grammar.sources import GrammarError, json_value
from dgpp_core.text.grammar.trial import TOO_MUCH, Trial
from dgpp_core.text.stack import TextStack


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that says nothing is sampled with."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """The served model.

    Attributes:
        options: as the service was started.
        text: tokenizer, template and markers.
        ready: the engine's limits.
        defaults: sampling defaults, those of the command line over those of the checkpoint.
        efforts: what each `reasoning_effort` sets in the template; an effort that is missing is not available.
        created: Unix time of the start.
        constrained: whether replies can be kept to a grammar.
        trial: where grammars are tried before the engine gets them.
        sight: how images are shown to the model; None where it takes none.
        files: reads files of requests.
    """

    options: ServeOptions
    text: TextStack
    ready: Ready
    defaults: SamplingDefaults
    efforts: dict[str, dict[str, Any]]
    created: int
    constrained: bool = False
    trial: Trial | None = None
    sight: Sight | None = None
    files: Files = msgspec.field(default_factory=lambda: Files(FileInputs()))

    @property
    def settings(self) -> EngineSettings:
        """The engine's settings."""
        return msgspec.json.decode(self.options.settings, type=EngineSettings)

    def try_source(self, source: str) -> None:
        """Whether the engine will be able to compile a grammar.

        Raises:
            GrammarError: it will not, or not in time.
        """
        if self.trial is not None:
            self.trial.check(source)

    def refused_path(self, written: Any, checked: Any) -> str:
        """The path of the keyword in ``written`` for which ``checked`` does not compile; empty for the whole."""
        why = self._verdict(checked)
        return "" if not why or why.startswith(TOO_MUCH) else refused_path(written, checked, why, self._verdict)

    def _verdict(self, schema: Any) -> str:
        try:
            self.try_source(json_value(schema))
        except GrammarError as error:
            return str(error)
        return ""


def served_model(
    options: ServeOptions,
    text: TextStack,
    ready: Ready,
    created: int,
    trial: Trial | None = None,
    files: Files | None = None,
) -> Served:
    """The model of ``options``, now that its text and its engine are there."""
    names = [field.name for field in msgspec.structs.fields(SamplingDefaults)]
    own = {name: getattr(text.defaults, name) for name in names}
    given = {name: value for name in names if (value := getattr(options.sampling, name)) is not None}
    return Served(
        options=options,
        text=text,
        ready=ready,
        defaults=SamplingDefaults(**(own | given)),
        efforts=effort_mapping(text.switches.efforts, text.switches.thinking),
        created=created,
        constrained=ready.constrained and bool(text.defaults.eos_ids),
        trial=trial,
        sight=sight_of(options.vision, text, Path(options.checkpoint), options.images),
        files=files or Files(options.files),
    )
