"""Prompts that a template was recorded to render, as golden cases of `ModelConformance`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ABSENT = {"null_content": ("</think>None<tool_call>", "</think><tool_call>")}
"""Content that is absent is empty text here; the recorder handed templates a None, which some write out."""


def recorded_cases(
    folder: Path, name: str, amended: Mapping[str, tuple[str, str]] | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """What ``name``.json says of ``conversations.json``, both in ``folder``; a recorded refusal is left out.

    Args:
        amended: by case, a part of its prompt and what stands there where dgpp renders it.
    """
    rendered, cases = (
        json.loads((folder / f"{file}.json").read_text(encoding="utf-8")) for file in (name, "conversations")
    )
    for case, (old, new) in (amended or {}).items():
        assert old in rendered[case]["prompt"], f"{name}, {case}: nothing to amend"
        rendered[case]["prompt"] = rendered[case]["prompt"].replace(old, new)
    return {case: given | rendered[case] for case, given in cases.items() if "prompt" in rendered.get(case, {})}
