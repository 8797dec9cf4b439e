"""`/v1/files`: uploads, which later requests name by their ids, in the forms of two dialects."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from litestar import delete, get, post
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from dgpp_core.server.messages.files import (
    FILE_METADATA_TYPES,
    HEADER,
    FileDeleted,
    metadata,
    metadata_list,
)
from dgpp_core.server.messages.prepare import check_version
from dgpp_core.server.openapi_parts import any_of, errors, reads, ref
from dgpp_core.server.routes import Incoming, json_answer, service_of
from dgpp_core.server.store import Purpose, StoredFile
from dgpp_core.server.uploads import Upload, read_upload

PREFIX = "/v1/files"
PARAM = "file_id"
"""What errors call the id in a path."""
BYTES = "application/octet-stream"


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """Every file, the oldest first."""

    data: tuple[StoredFile, ...]
    object: Literal["list"] = "list"
    has_more: Literal[False] = False


class DeletedFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is no longer kept."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class UploadForm(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of an upload; `file` has a filename. Only with `anthropic-version` may `purpose` be left out."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose


@post("/v1/files", status_code=200)
async def upload_file(request: Incoming) -> ASGIApp:
    """Keep a file."""
    service, theirs = service_of(request), _speaks_messages(request)
    most = service.served.files.limits.max_file_bytes
    found = await read_upload(
        request.headers.get("content-type", ""), request.stream(), most, "user_data" if theirs else None
    )
    created = int(service.outside.time())

    def keep(upload: Upload) -> StoredFile:
        with service.served.files.turn():
            return service.store.add(upload.filename, upload.purpose, upload.data, created)

    return _answer(await asyncio.to_thread(keep, found), request)


@get("/v1/files")
async def list_files(request: Incoming) -> ASGIApp:
    """List what is kept."""
    kept = service_of(request).store.all()
    return json_answer(msgspec.json.encode(metadata_list(kept) if _speaks_messages(request) else FileList(data=kept)))


@get("/v1/files/{file_id:str}")
async def get_file(request: Incoming) -> ASGIApp:
    """Describe a file."""
    return _answer(service_of(request).store.get(_id(request), PARAM), request)


@delete("/v1/files/{file_id:str}", status_code=200)
async def delete_file(request: Incoming) -> ASGIApp:
    """Forget a file."""
    await asyncio.to_thread(service_of(request).store.delete, number := _id(request), PARAM)
    return json_answer(msgspec.json.encode((FileDeleted if _speaks_messages(request) else DeletedFile)(id=number)))


@get("/v1/files/{file_id:str}/content")
async def get_content(request: Incoming) -> ASGIApp:
    """Give the bytes of a file."""
    _, data = await asyncio.to_thread(service_of(request).store.read, _id(request), PARAM)
    # A browser must not take what somebody uploaded for a page of this service.
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return ASGIResponse(body=data, media_type=BYTES, headers=headers)


def _answer(file: StoredFile, request: Incoming) -> ASGIApp:
    return json_answer(msgspec.json.encode(metadata(file) if _speaks_messages(request) else file))


def _speaks_messages(request: Incoming) -> bool:
    """Whether the client is one of the messages dialect.

    Raises:
        RequestError: of a version that has other answers.
    """
    check_version(request.headers)
    return HEADER in request.headers


def _id(request: Incoming) -> str:
    return str(request.path_params["file_id"])


def _paths() -> dict[str, Any]:
    form = {"multipart/form-data": {"schema": ref("UploadForm")}}
    file = any_of(("StoredFile", "FileMetadata"))
    deleted = any_of(("DeletedFile", "FileDeleted"))
    kept = {"description": "The file.", "content": {"application/json": {"schema": file}}}
    gone = {"description": "It is gone.", "content": {"application/json": {"schema": deleted}}}
    number = {"name": "file_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    named = {"parameters": [number]}
    upload = {
        "summary": "Keep a file.",
        "requestBody": {"required": True, "content": form},
        "responses": {"200": kept} | errors((400, 401, 403, 413, 500, 503)),
    }
    content = {BYTES: {"type": "string", "contentMediaType": BYTES}}
    faults = (401, 404, 500, 503)
    deletion = {"summary": "Forget a file.", "responses": {"200": gone} | errors((400, 403, *faults))}
    listing = reads("List what is kept.", {"application/json": any_of(("FileList", "FileMetadataList"))}, (400, 401))
    return {
        "/v1/files": {"post": upload} | listing,
        "/v1/files/{file_id}": named
        | {"delete": deletion}
        | reads("Describe a file.", {"application/json": file}, (400, 401, 404)),
        "/v1/files/{file_id}/content": named | reads("Give the bytes of a file.", content, faults),
    }


FILE_TYPES = (StoredFile, FileList, DeletedFile, UploadForm, *FILE_METADATA_TYPES)
FILE_PATHS = _paths()
FILE_ROUTES = (upload_file, list_files, get_file, delete_file, get_content)
