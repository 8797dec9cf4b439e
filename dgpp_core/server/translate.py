"""Other dialects' requests as chat requests, and what is wrong with those in the words of the dialect."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dgpp_core.api.errors import RequestError
from dgpp_core.server.parse import shorten
from dgpp_core.server.requests import ChatRequest, SamplingRequest

Result = TypeVar("Result")


class Paths:
    """Where the parts of a chat request stand in the request that it was made from.

    Args:
        names: chat fields and the client's names for them; what stands below a field stands below its name.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._own = dict(names)

    def add(self, chat: str, own: str) -> None:
        """``chat`` was made from ``own``."""
        self._own[chat] = own

    def own(self, path: str) -> str:
        """The client's path of ``path``: the longest known part of it decides."""
        ends = [end for end in range(len(path), 0, -1) if end == len(path) or path[end] in ".["]
        end = next((end for end in ends if path[:end] in self._own), 0)
        return self._own[path[:end]] + path[end:] if end else path

    @contextlib.contextmanager
    def renamed(self) -> Iterator[None]:
        """Errors of the block name the client's own fields."""
        try:
            yield
        except RequestError as error:
            if error.param is None:
                raise
            own = self.own(error.param)
            raise RequestError(
                error.what.replace(error.param, own),
                status=error.status,
                param=own,
                code=error.code,
                hint=error.hint.replace(error.param, own),
            ) from None


def as_chat(request: SamplingRequest, **own: Any) -> ChatRequest:
    """The chat request with the shared fields of ``request`` and ``own``, which have been checked already."""
    shared = {name: getattr(request, name) for name in SamplingRequest.__struct_fields__}
    return ChatRequest(**(shared | own))


class CallOrder:
    """The calls of a conversation so far, for the results that name them: templates take these by their order alone."""

    def __init__(self) -> None:
        self._order: dict[str, int] = {}

    def add(self, call: str) -> None:
        """A call was made."""
        self._order[call] = len(self._order)

    def check(self, call: str, path: str) -> None:
        """A result names ``call``.

        Raises:
            RequestError: 400, there is no such call before it.
        """
        if call not in self._order:
            raise no_such_call(call, path)

    def sort(self, results: Iterable[tuple[str, Result]]) -> Sequence[Result]:
        """Results, by the ids of their calls, in the order of the calls."""
        return [result for _, result in sorted(results, key=lambda pair: self._order[pair[0]])]


def no_such_call(call: str, path: str) -> RequestError:
    """400 for a result of no call."""
    return RequestError(f"`{path}`: no call before this result has the id {shorten(call)}", param=path)
