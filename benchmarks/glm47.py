"""GLM-4.7 on a GPU: the decode step at several streams, drafted and with bf12, prefill, and memory beside its plan.

Random weights are made on the device, so no checkpoint is needed. ``python benchmarks/glm47.py --out FILE`` writes what
`dgpp bench` prints as JSON, one part a command, each in a process of its own; ``--checkpoint DIR`` adds the time from
the start of a service to READY.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LAYERS, FORMAT, STREAMS = 16, "nvfp4", "1,4,8,16"


def bench(*arguments: str) -> dict[str, Any]:
    """The JSON of one `dgpp bench` command; an error of it ends the run."""
    line = [sys.executable, "-m", "dgpp_core.cli", "bench", *arguments, "--json"]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(layers: int, form: str, checkpoint: str | None) -> dict[str, Any]:
    """All parts; the first one's keys are those of the whole."""
    model = ("--plugin", "glm47", "--random", "--layers", str(layers), "--format", form, "--device", "cuda")
    decode = ("decode", *model, "--streams", STREAMS, "--context", "400")
    report = bench(*decode)
    report["drafted"] = bench(*decode, "--mtp-depth", "1", "--accept-rate", "0.8")
    report["bf12"] = bench(*decode, "--bf16-weights", "bf12")
    plain = report["decode"]
    report["drafted_over_plain"] = {
        streams: row["ms_per_step"] / plain[streams]["ms_per_step"]
        for streams, row in report["drafted"]["decode"].items()
    }
    prefill = bench("prefill", *model, "--tokens", "2048,8192", "--chunk", "0")
    report["prefill"], report["prefill_memory"] = prefill["prefill"], prefill["memory"]
    if checkpoint is not None:
        boots = bench("boot", "--plugin", "glm47", "--checkpoint", checkpoint, "--device", "cuda", "--runs", "3")
        report["boot_s"], report["boots_s"] = boots["boot_s"], boots["boots_s"]
    return report


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--format", default=FORMAT)
    parser.add_argument("--checkpoint", help="a written checkpoint, for the time of a start")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = json.dumps(measured(given.layers, given.format, given.checkpoint), indent=2)
    if given.out is None:
        print(text)
    else:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
