"""Reports of long measurements: JSON with the command that made them and the load of the machine they were made on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec


def report_json(arguments: Sequence[str], found: Mapping[str, Any], out: Path | None) -> str:
    """``found`` with its command and the load average as indented JSON, which is written to ``out`` too.

    Args:
        arguments: of the command, the script first; ``--out FILE`` is left out.
    """
    script, *rest = arguments
    if "--out" in rest:
        at = rest.index("--out")
        del rest[at : at + 2]
    facts = {
        "command": " ".join(["python", f"benchmarks/{Path(script).name}", *rest]),
        "cpus": os.cpu_count(),
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }
    text = msgspec.json.format(msgspec.json.encode({**facts, **found}), indent=1).decode()
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return text
