"""Sampling defaults and end ids from generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from dgpp_core.api.errors import ConfigError

_FILE = "generation_config.json"
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that says nothing gets; the fields mean what they do in `SamplingParams`.

    Attributes:
        eos_ids: every id that ends a reply, those of generation_config.json first.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    eos_ids: tuple[int, ...]


class _GenerationConfig(msgspec.Struct, frozen=True, kw_only=True):
    do_sample: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    min_p: _Share | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    eos_token_id: _Id | list[_Id] | None = None

    @property
    def samples(self) -> bool:
        """A file that does not say is taken for sampling if it sets how, and for greedy if it does not."""
        if self.do_sample is not None:
            return self.do_sample
        return any(value is not None for value in (self.temperature, self.top_p, self.top_k, self.min_p))


def read_generation_defaults(folder: Path, config_eos: tuple[int, ...]) -> GenerationDefaults:
    """Defaults of the checkpoint in ``folder``; greedy without the file or where it says ``do_sample: false``.

    Args:
        config_eos: the end ids of config.json, kept after those of generation_config.json.

    Raises:
        ConfigError: the file cannot be read or a field has the wrong type or range.
    """
    found = _read(folder / _FILE)
    listed = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
    ids = [end for end in listed if end is not None] + list(config_eos)
    temperature = 1.0 if found.temperature is None else found.temperature
    return GenerationDefaults(
        temperature=temperature if found.samples else 0.0,
        top_p=1.0 if found.top_p is None else found.top_p,
        top_k=found.top_k or 0,
        min_p=found.min_p or 0.0,
        repetition_penalty=1.0 if found.repetition_penalty is None else found.repetition_penalty,
        eos_ids=tuple(dict.fromkeys(ids)),
    )


def _read(path: Path) -> _GenerationConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except FileNotFoundError:
        return _GenerationConfig()
    except OSError as error:
        raise ConfigError("generation_config.json cannot be read", where=str(path), found=str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason, _, field = str(error).partition(" - at `$.")
        raise ConfigError(
            "generation_config.json is malformed",
            where=f"{path}: {field.rstrip('`') or 'the JSON text'}",
            found=reason,
            hint="correct the field, or remove the file for greedy defaults",
        ) from error
