"""The one exception tree of dgpp.

Every error says what is wrong, where, what was found, what was expected and what to do next. The five parts are
fields, so that a command can print them as text or JSON and the HTTP service can pick what a client may see.
"""

from __future__ import annotations


class DgppError(Exception):
    """Base of every error that dgpp raises on purpose.

    Args:
        what: one sentence, no full stop: what is wrong.
        where: the file, field, tensor, plugin or request it was found in.
        found: what was there.
        expected: what should have been there.
        hint: the next thing to do.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", found: str = "", expected: str = "", hint: str = "") -> None:
        self.what, self.where, self.found, self.expected, self.hint = what, where, found, expected, hint
        super().__init__(what)

    def parts(self) -> dict[str, str]:
        """The filled-in fields, in the order they are printed."""
        names = ("what", "where", "found", "expected", "hint")
        return {name: getattr(self, name) for name in names if getattr(self, name)}

    def __str__(self) -> str:
        labels = {"where": "where", "found": "found", "expected": "expected", "hint": "next step"}
        return "\n".join([self.what, *(f"  {labels[k]}: {v}" for k, v in self.parts().items() if k != "what")])

    def line(self) -> str:
        """The same on one line, for a log or an HTTP message."""
        return "; ".join(text if name == "what" else f"{name}: {text}" for name, text in self.parts().items())


class ConfigError(DgppError):
    """A deployment file, site file, flag or model config.json is malformed or inconsistent."""

    exit_code = 2


class CheckpointError(DgppError):
    """A checkpoint is missing, incomplete, damaged or does not match the model."""


class ScaleError(CheckpointError):
    """A matrix cannot be held in a storage, or not cut so: raised by whoever knows no tensor's name, to be named."""


class TokenizerError(CheckpointError):
    """A tokenizer or chat template cannot be loaded or used."""


class PluginError(DgppError):
    """A plugin is broken, collides with another or was written for another contract."""


class PlanError(DgppError):
    """The memory plan does not fit the device, or the model cannot be divided among so many ranks."""


class LaunchError(DgppError):
    """A node of a cluster cannot be reached, or does not do what it is told."""


class EngineError(DgppError):
    """The engine failed; every request it held has ended."""

    exit_code = 2


class RequestError(DgppError):
    """One request cannot be served; all others go on.

    Args:
        status: the HTTP status.
        param: the request field, as a path such as ``messages[0].role``.
        code: the machine-readable code of the error object.
    """

    def __init__(
        self,
        what: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(what, where=param or "", hint=hint)
        self.status, self.param, self.code = status, param, code
