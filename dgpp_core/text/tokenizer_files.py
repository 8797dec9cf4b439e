"""The files of a tokenizer, parsed and checked: tokenizer.json, tokenizer_config.json, chat_template.jinja."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from dgpp_core.api.errors import TokenizerError

T = TypeVar("T")
Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


class AddedToken(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of ``added_tokens``. `tokenizers` needs every field."""

    id: Id
    content: Name
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class Bpe(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="BPE"):
    """Byte-pair encoding, byte-level or with byte fallback.

    Prefixes and suffixes of word pieces belong to another kind of vocabulary (and a wrong one aborts the library);
    dropout would make encoding random.
    """

    vocab: dict[str, Id]
    merges: msgspec.Raw
    unk_token: str | None = None
    dropout: Annotated[float, msgspec.Meta(ge=0, le=0)] | None = None
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class Unigram(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="Unigram"):
    """SentencePiece unigram pieces with their log-probabilities; the id is the index."""

    vocab: list[tuple[str, float]]
    unk_id: Id | None = None
    byte_fallback: bool = False


class TemplateToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that a post-processor adds to every prompt."""

    ids: list[Id]
    tokens: list[Name]


class PostProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to a prompt: a template, or several processors in a row; other kinds have neither field."""

    type: str
    special_tokens: dict[str, TemplateToken] = {}
    processors: list[PostProcessor] = []


class TokenizerFile(msgspec.Struct, frozen=True, kw_only=True):
    """What of tokenizer.json is looked at here. The library writes all of these fields, so none may be missing."""

    version: str
    truncation: dict[str, Any] | None
    padding: dict[str, Any] | None
    added_tokens: list[AddedToken]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    post_processor: PostProcessor | None
    decoder: dict[str, Any]
    model: Bpe | Unigram


class ConfiguredToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token as tokenizer_config.json describes it."""

    content: Name
    special: bool = False


class NamedTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """One of several chat templates of a checkpoint; ``default`` is the one that is used."""

    name: str
    template: str


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What tokenizer_config.json and the template file say; the defaults stand for files that do not exist.

    Attributes:
        special_tokens: pairs such as (``eos_token``, ``<|im_end|>``).
        added_tokens: pairs (id, token), ids ascending.
        chat_template: Jinja source.
        chat_template_file: where that came from.
    """

    special_tokens: tuple[tuple[str, str], ...] = ()
    added_tokens: tuple[tuple[int, ConfiguredToken], ...] = ()
    chat_template: str | None = None
    chat_template_file: str = ""


def read_tokenizer_file(path: Path) -> tuple[TokenizerFile, bytes]:
    """Parse tokenizer.json.

    Returns:
        the checked part and the file's bytes.

    Raises:
        TokenizerError: the file is missing or not JSON, or a field is missing or has the wrong type.
    """
    raw = _read(path)
    if raw is None:
        raise TokenizerError(
            "the checkpoint has no tokenizer.json",
            where=str(path),
            expected="a tokenizer in Hugging Face's format",
            hint="download the whole repository, or convert a SentencePiece model to tokenizer.json",
        )
    return _parse(raw, TokenizerFile, path), raw


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Parse tokenizer_config.json and take the chat template: chat_template.jinja goes before the config's own.

    Raises:
        TokenizerError: a file that exists cannot be read, or a field has the wrong type.
    """
    path = folder / "tokenizer_config.json"
    raw = _read(path)
    fields = {} if raw is None else _parse(raw, dict[str, Any], path)
    template, source = _template(folder, fields, path)
    return TokenizerConfig(
        special_tokens=tuple(_special_tokens(fields, path)),
        added_tokens=tuple(_added_tokens(fields, path)),
        chat_template=template,
        chat_template_file=source,
    )


def _special_tokens(fields: dict[str, Any], path: Path) -> list[tuple[str, str]]:
    pairs = []
    for name, value in fields.items():
        if not name.endswith("_token") or name.startswith("add_") or value is None:
            continue
        token = _convert(value, Name | ConfiguredToken, path, name)
        pairs.append((name, token.content if isinstance(token, ConfiguredToken) else token))
    return pairs


def _added_tokens(fields: dict[str, Any], path: Path) -> list[tuple[int, ConfiguredToken]]:
    name = "added_tokens_decoder"
    declared = _convert(fields.get(name) or {}, dict[Id, ConfiguredToken], path, name)
    return sorted(declared.items())


def _template(folder: Path, fields: dict[str, Any], config: Path) -> tuple[str | None, str]:
    path = folder / "chat_template.jinja"
    raw = _read(path)
    if raw is not None:
        try:
            return raw.decode(), str(path)
        except UnicodeDecodeError as error:
            raise TokenizerError("the chat template is not UTF-8", where=str(path), found=str(error)) from error
    where = f"{config}: chat_template"
    value = _convert(fields.get("chat_template"), str | list[NamedTemplate] | None, config, "chat_template")
    if not isinstance(value, list):
        return value, where
    named = {entry.name: entry.template for entry in value}
    if "default" not in named:
        raise TokenizerError(
            "none of the chat templates is the default one",
            where=where,
            found=", ".join(named) or "an empty list",
            expected="an entry named default",
        )
    return named["default"], where


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenizerError("a tokenizer file cannot be read", where=str(path), found=str(error)) from error


def _parse(raw: bytes, kind: type[T], path: Path) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(error, path, "") from error


def _convert(value: Any, kind: Any, path: Path, field: str) -> Any:
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _malformed(error, path, field) from error


def _malformed(error: Exception, path: Path, prefix: str) -> TokenizerError:
    reason, _, inside = str(error).partition(" - at `$")
    field = (prefix + inside.rstrip("`")).lstrip(".") or "the JSON text"
    return TokenizerError(
        "a tokenizer file is malformed", where=f"{path}: {field}", found=reason, hint="fetch the file again"
    )
