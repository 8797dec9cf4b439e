"""SmolLM2 on a CPU beside transformers: ``python benchmarks/smollm2_cpu.py --checkpoint DIR [--out FILE]``.

Every goal is a ratio of two figures of one run. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMPT, STEPS, ROUNDS = 128, 48, 3


def decode_rates(folder: Path) -> dict[str, Any]:
    """Tokens a second of transformers and of the engine at one and eight streams, interleaved; medians of rounds."""
    import torch
    from transformers import AutoModelForCausalLM

    from dgpp_core.config.settings import EngineSettings
    from dgpp_core.host.loading import load_plugins
    from dgpp_core.testing.measure import measure_decode, read_bandwidth
    from dgpp_core.testing.world import World

    model = load_plugins(environ=os.environ).model("smollm2")
    world = World.from_checkpoint(model, folder, EngineSettings(max_concurrency=8, kv_capacity=8 * 512))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([[(7 + 31 * i) % 49152 for i in range(PROMPT)]])

    def generate(cache: str) -> float:
        """Tokens a second past the first token."""
        marks = []
        for count in (1, 1 + STEPS):
            start = time.perf_counter()
            with torch.inference_mode():
                peer.generate(
                    tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=count,
                    min_new_tokens=count, cache_implementation=cache, disable_compile=True,
                )  # fmt: skip
            marks.append(time.perf_counter() - start)
        return STEPS / (marks[1] - marks[0])

    bandwidth = read_bandwidth(time.perf_counter, torch.device("cpu"))
    rounds: list[dict[str, float]] = []
    floors: dict[str, Any] = {}
    for _ in range(ROUNDS):
        row = {f"transformers_{cache}": generate(cache) for cache in ("dynamic", "static")}
        for streams in (1, 8):
            found = measure_decode(
                world, time.perf_counter, streams=streams, context=PROMPT + STEPS // 2, steps=STEPS, runs=1,
                bandwidth=bandwidth,
            )  # fmt: skip
            row[f"dgpp_{streams}"] = found.tokens_per_second
            floors[str(streams)] = {"bytes": found.bytes, "floor_ms": found.floor_ms, "ms_per_step": found.ms_per_step}
        rounds.append(row)
    median = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    fastest = max(median["transformers_dynamic"], median["transformers_static"])
    return {
        "tokens_per_second": median,
        "read_bandwidth_gb_s": bandwidth / 1e9,
        "floors": floors,
        "one_stream_over_transformers": median["dgpp_1"] / fastest,
        "eight_streams_over_one": median["dgpp_8"] / median["dgpp_1"],
    }


def cached_prefill(folder: Path) -> dict[str, Any]:
    """Time to the first token of 2,000 tokens, cold and cached."""
    from dgpp_core.config.settings import EngineSettings
    from dgpp_core.host.loading import load_plugins
    from dgpp_core.testing.measure import measure_prefill
    from dgpp_core.testing.world import World

    model = load_plugins(environ=os.environ).model("smollm2")
    world = World.from_checkpoint(model, folder, EngineSettings(max_concurrency=2, kv_capacity=4096))
    world.reply([5] * 300, 2)
    found = measure_prefill(world, time.perf_counter, tokens=2000, runs=1)
    return {"cold_ms": found.ms, "cached_ms": found.cached_ms, "cached_over_cold": found.ratio}


def served(folder: Path, port: int) -> dict[str, Any]:
    """CPU of the front end a token at eight streams, and resident sets beside their limits."""
    command = [sys.executable, "-m", "dgpp_core.cli", "serve", "--plugin", "smollm2", "--checkpoint", str(folder)]
    plan = json.loads(
        subprocess.run([*command[:3], "plan", *command[4:], "--json"], capture_output=True, text=True).stdout
    )
    server = subprocess.Popen([*command, "--port", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(url)
        engine = _child(server.pid)
        model = json.load(urllib.request.urlopen(url + "/v1/models"))["data"][0]["id"]
        before = _cpu(server.pid)
        with ThreadPoolExecutor(8) as pool:
            tokens = sum(pool.map(lambda n: _stream(url, model, n), range(8)))
        spent = _cpu(server.pid) - before
        _stream(url, model, 99, filler=1900)
        return {
            "front_end_cpu_ms_a_token": spent / tokens * 1e3,
            "front_end_mb": _resident(server.pid) / 1e6,
            "engine_mb": _resident(engine) / 1e6,
            "plan_mb": plan["total"] / 1e6,
            "engine_over_plan": _resident(engine) / plan["total"],
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def _wait(url: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(url + "/health", timeout=1).read()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit("the server did not become ready")


def _stream(url: str, model: str, number: int, filler: int = 0) -> int:
    body = {
        "model": model, "stream": True, "max_tokens": 96, "ignore_eos": True,
        "messages": [{"role": "user", "content": f"Count from {number}." + " and on" * (filler // 2)}],
    }  # fmt: skip
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for _ in response:
            pass
    return 96


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Run all parts, print the goals, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--port", type=int, default=18097)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    import torch
    import transformers

    report = {
        "model": "SmolLM2-135M-Instruct, float32",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": "python benchmarks/smollm2_cpu.py",
        "served": served(given.checkpoint, given.port),
        "decode": decode_rates(given.checkpoint),
        "prefill_2000": cached_prefill(given.checkpoint),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
