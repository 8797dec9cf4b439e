"""What a plugin says about a model before anything is loaded. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the core needs to know of a model's config.json; a family adds its own fields in a subclass.

    Attributes:
        vocab_size: rows of the output head.
        max_positions: the positional ceiling in tokens.
        hidden_size: width of the last hidden state.
        eos_ids: ids that end a reply, as config.json has them (generation_config.json may add more).
        prefill_tail: rows at a prompt's end that alone have to go through every layer (`StepBatch.floors`), where
            ``prefill`` is ``bounded``; 0 where all rows do.
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    eos_ids: tuple[int, ...] = ()
    prefill_tail: int = 0


class PackagedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that a registry package carries as a GGUF file.

    Attributes:
        distribution: the package, as pip names it.
        version: the version that was checked.
        suffix: how the file's name ends.
        sha256: of the file.
    """

    distribution: str
    version: str
    suffix: str
    sha256: str


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One servable model.

    Attributes:
        name: what ``--plugin`` takes, for example ``glm47``.
        title: one line for listings.
        architectures: the ``architectures`` entries of config.json that it accepts.
        formats: weight formats it can load (``bf16``, ``fp8``, ``nvfp4``, ...).
        repository: the default Hugging Face repository.
        read_config: turns a parsed config.json into the family's `ModelConfig`; raises `ConfigError` naming the field.
        full_config: a config.json of the real model, for ``synth --layers`` and for plans without a checkpoint.
        tiny_config: a config.json of a model small enough for a test, with every kind of layer in it.
        package: a registry package that carries the weights, if there is one.
        draft_depth: the most tokens its drafter proposes a step; 0 without a drafter.
        quantised: by weight format, the ``quantization_config`` that says so in a config.json of the full model;
            what ``synth --format`` writes there.
        releases: by Hugging Face repository, the weight format of its checkpoint, which is one of ``quantised``. A
            deployment that names one is matched with the model, and planned before its checkpoint is there.
        shorten: what ``synth --layers`` still has to do to a config whose ``num_hidden_layers`` and lists with an entry
            a layer were cut: whatever else in it speaks of single layers. Raises `ConfigError` where nothing can be
            made of so few. None where nothing does.
        rescale: a config.json whose rotary embedding is stretched as ``rope_scaling`` of a deployment says, whose keys
            it is given. Raises `ConfigError` where it cannot be. None of a model that does not take it.
    """

    name: str
    title: str
    architectures: tuple[str, ...]
    repository: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    full_config: Mapping[str, Any]
    tiny_config: Mapping[str, Any]
    formats: tuple[str, ...] = ("bf16",)
    package: PackagedCheckpoint | None = None
    draft_depth: int = 0
    quantised: Mapping[str, Mapping[str, Any]] = {}
    releases: Mapping[str, str] = {}
    shorten: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    rescale: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] | None = None

    def config_of(self, repository: str) -> Mapping[str, Any] | None:
        """The config.json of a repository of this model, without fetching it; None of one that it does not name."""
        if (form := self.releases.get(repository)) is not None:
            return {**self.full_config, "quantization_config": self.quantised[form]}
        return self.full_config if repository == self.repository else None


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """How a family talks: its template and the markers of its replies.

    Attributes:
        chat_template: a Jinja template used where the checkpoint has none.
        reasoning: the texts that open and close reasoning, or None where the model has none.
        thinking_switches: template variables that turn reasoning on and off.
    """

    chat_template: str | None = None
    reasoning: tuple[str, str] | None = None
    thinking_switches: tuple[str, ...] = ()


class PlanTerm(msgspec.Struct, frozen=True):
    """A line of the memory plan that only the family can know, in bytes a rank.

    ``exact``: these are tensors of the model, allocated as counted; otherwise it is the most that something may take.
    """

    name: str
    bytes: int
    note: str = ""
    exact: bool = True
