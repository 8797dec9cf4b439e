"""`/v1/files` in the form of the dialect, for requests with the header ``anthropic-version``, as its clients send."""

from __future__ import annotations

import mimetypes
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from dgpp_core.server.store import StoredFile

HEADER = "anthropic-version"


class FileMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is kept: its size in bytes, and when it came, as RFC 3339 has it."""

    id: str
    type: Literal["file"] = "file"
    created_at: Annotated[str, msgspec.Meta(extra_json_schema={"format": "date-time"})]
    filename: str
    mime_type: str
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    downloadable: Literal[True] = True


class FileMetadataList(msgspec.Struct, frozen=True, kw_only=True):
    """Every file, the oldest first; there are no pages."""

    data: tuple[FileMetadata, ...]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no longer kept."""

    id: str
    type: Literal["file_deleted"] = "file_deleted"


def _known_types() -> mimetypes.MimeTypes:
    """Types by the end of a name, as Python knows them, not as this machine does."""
    types = mimetypes.MimeTypes()
    types.add_type("text/markdown", ".md")  # Python's own since 3.13
    return types


_TYPES = _known_types()


def metadata(file: StoredFile) -> FileMetadata:
    """What is said of ``file``."""
    return FileMetadata(
        id=file.id,
        created_at=datetime.fromtimestamp(file.created_at, UTC).isoformat().replace("+00:00", "Z"),
        filename=file.filename,
        mime_type=_TYPES.guess_type(file.filename)[0] or "application/octet-stream",
        size_bytes=file.bytes,
    )


def metadata_list(files: Sequence[StoredFile]) -> FileMetadataList:
    """What is said of all files."""
    data = tuple(map(metadata, files))
    return FileMetadataList(data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None)


FILE_METADATA_TYPES = (FileMetadata, FileMetadataList, FileDeleted)
