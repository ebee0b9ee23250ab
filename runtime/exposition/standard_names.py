"""Names of metrics that other tools read: vLLM's, which dashboards and the endpoint picker of
Kubernetes' Gateway API know.

Each is made of Baton's own metrics when they are scraped, so it costs a token nothing and cannot
differ from them. docs/metrics.md names those that are absent, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from baton.runtime import metrics
from baton.runtime.exposition import genai
from baton.runtime.metric_factory import REGISTRY

Source = Counter | Gauge | Histogram
Labels = dict[str, str]
_FREE_STATES = ("free", "cached")

ROUTER_HISTOGRAMS: dict[str, Histogram] = {
    "vllm:time_to_first_token_seconds": metrics.TTFT,
    "vllm:inter_token_latency_seconds": metrics.ITL,
    "vllm:time_per_output_token_seconds": metrics.ITL,  # the name before
    "vllm:request_time_per_output_token_seconds": genai.TIME_PER_OUTPUT_TOKEN,
    "vllm:e2e_request_latency_seconds": metrics.E2E,
    "vllm:request_queue_time_seconds": metrics.REQUEST_QUEUE_SECONDS,
    "vllm:request_prefill_time_seconds": metrics.REQUEST_PREFILL_SECONDS,
    "vllm:request_decode_time_seconds": metrics.REQUEST_DECODE_SECONDS,
    "vllm:request_inference_time_seconds": metrics.REQUEST_INFERENCE_SECONDS,
    "vllm:request_prompt_tokens": metrics.PROMPT_TOKENS,
    "vllm:request_generation_tokens": metrics.OUTPUT_TOKENS,
}
WORKER_HISTOGRAMS: dict[str, Histogram] = {"vllm:request_queue_time_seconds": metrics.QUEUE_SECONDS}


def publish_router(model: str) -> None:
    """Add the names of a router, which stands for its whole fleet."""
    _replace(_Names(model, _router_values, ROUTER_HISTOGRAMS))


def publish_worker(model: str, block_size: int) -> None:
    """Add the names of a worker; a second call replaces those of the first."""

    def values() -> Iterable[Metric]:
        yield from _worker_values()
        info = {"block_size": str(block_size), "num_gpu_blocks": str(int(_blocks()))}
        yield _gauge("vllm:cache_config_info", "Size of the KV pool.", 1.0, info)

    _replace(_Names(model, values, WORKER_HISTOGRAMS))


class _Names(Collector):
    def __init__(
        self,
        model: str,
        values: Callable[[], Iterable[Metric]],
        histograms: dict[str, Histogram],
    ) -> None:
        self._labels = {"model_name": model, "engine": "0"}
        self._values = values
        self._histograms = histograms

    def collect(self) -> Iterable[Metric]:
        for metric in self._values():
            yield _labelled(metric, metric.name, self._labels)
        for name, source in self._histograms.items():
            (family,) = source.collect()
            yield _labelled(family, name, self._labels)


_published: list[_Names] = []


def _replace(names: _Names) -> None:
    while _published:
        REGISTRY.unregister(_published.pop())
    REGISTRY.register(names)
    _published.append(names)


def _router_values() -> Iterable[Metric]:
    queued, waiting = _value(metrics.WAITING_REQUESTS), _value(metrics.FLEET_WAITING, role="decode")
    sent = max(0.0, _value(metrics.ACTIVE_REQUESTS) - queued)
    # of those that wait on workers, as large a share as this router's of all that are there
    share = sent / max(sent, _value(metrics.FLEET_REQUESTS), 1.0)
    yield from _load(
        running=max(0.0, sent - share * waiting),
        waiting=queued + waiting,
        kv_use=_value(metrics.FLEET_KV_USE, role="decode"),
    )
    for name, source in (
        ("vllm:prompt_tokens", metrics.PROMPT_TOKENS),
        ("vllm:generation_tokens", metrics.OUTPUT_TOKENS),
    ):
        yield _counter(name, "Tokens of requests.", _value(source, "_sum"))
    success = Metric("vllm:request_success", "Choices by finish reason.", "counter")
    for reason, own in (("stop", ("stop", "tool_calls")), ("length", ("length",))):
        count = sum(_value(metrics.FINISHED_CHOICES, "_total", reason=each) for each in own)
        success.add_sample("vllm:request_success_total", {"finished_reason": reason}, count)
    yield success


def _worker_values() -> Iterable[Metric]:
    blocks = _blocks()
    free = sum(_value(metrics.POOL_BLOCKS, state=state) for state in _FREE_STATES)
    yield from _load(
        running=_value(metrics.RUNNING_REQUESTS),
        waiting=_value(metrics.WAITING_REQUESTS),
        kv_use=1 - free / blocks if blocks else 0.0,
    )
    for name, source, labels in (
        ("vllm:prefix_cache_queries", metrics.PREFIX_QUERIED_TOKENS, {}),
        ("vllm:prefix_cache_hits", metrics.PREFIX_CACHED_TOKENS, {}),
        ("vllm:num_preemptions", metrics.PREEMPTIONS, {}),
        ("vllm:prompt_tokens", metrics.TOKENS, {"kind": "prompt"}),
        ("vllm:generation_tokens", metrics.TOKENS, {"kind": "output"}),
    ):
        yield _counter(
            name, next(iter(source.describe())).documentation, _value(source, "_total", **labels)
        )


def _load(running: float, waiting: float, kv_use: float) -> Iterable[Metric]:
    yield _gauge("vllm:num_requests_running", "Requests beyond the queue.", running)
    yield _gauge("vllm:num_requests_waiting", "Requests in the queue.", waiting)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # the second is older
        yield _gauge(name, "Used share of the KV blocks; 1 is all.", kv_use)


def _blocks() -> float:
    return _value(metrics.POOL_BLOCKS)


def _value(source: Source, suffix: str = "", **labels: str) -> float:
    """Return the sum of a metric's series with these labels."""
    (family,) = source.collect()
    return sum(
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )


def _gauge(name: str, meaning: str, value: float, labels: Labels | None = None) -> Metric:
    metric = Metric(name, meaning, "gauge")
    metric.samples = [Sample(name, labels or {}, value)]
    return metric


def _counter(name: str, meaning: str, value: float) -> Metric:
    metric = Metric(name, meaning, "counter")
    metric.samples = [Sample(f"{name}_total", {}, value)]
    return metric


def _labelled(metric: Metric, name: str, labels: Labels) -> Metric:
    """Return a metric under another name, with more labels."""
    made = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        suffix = sample.name.removeprefix(metric.name)
        if suffix != "_created":
            made.samples.append(Sample(name + suffix, {**labels, **sample.labels}, sample.value))
    return made
