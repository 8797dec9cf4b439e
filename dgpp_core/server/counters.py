"""What the front end counts. The engine counts its own in `Stats`."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry, Histogram

LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
TOKEN_TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
TOKEN_BUCKETS = tuple(4**power for power in range(11))


class Counters:
    """Counters since the start; a request counts at most once as shed, cancelled or failed.

    Attributes:
        requests: validated generation requests that reached admission, refusals for want of room included.
        shed: refused for want of room.
        cancelled: left by their client.
        failed: ended by an error of the engine.
        rejected: 4xx answers.
        tokens: reply tokens.
        tool_calls: calls that replies made.
        finished: choices by finish reason.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self.requests = self.shed = self.cancelled = self.failed = self.rejected = self.tokens = 0
        self.tool_calls = 0
        self.finished: Counter[str] = Counter()

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, about, labelnames=("model_name",), buckets=buckets, registry=registry)
            return made.labels(model_name=model)

        self.latency = histogram("dgpp_e2e_request_latency_seconds", "Whole requests.", LATENCY_BUCKETS)
        self.token_time = histogram(
            "dgpp_request_time_per_output_token_seconds", "Decode time a token.", TOKEN_TIME_BUCKETS
        )
        self.prompt_tokens = histogram("dgpp_request_prompt_tokens", "Prompt tokens a request.", TOKEN_BUCKETS)
        self.reply_tokens = histogram("dgpp_request_generation_tokens", "Reply tokens a request.", TOKEN_BUCKETS)
