"""Objectives, and the conventional metrics: what an ended request counts as, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from baton.router.answers.objectives import PREFILLED, QUEUED, Scorekeeper, judged
from baton.runtime import metrics
from baton.runtime.cluster_config import SloConfig
from baton.runtime.exposition import standard_names
from baton.runtime.exposition.genai import RequestTimes
from baton.runtime.telemetry.timeline import NAMES, Phase
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.waiting import eventually

SLO = SloConfig(ttft_s=1.0, itl_s=0.1)
MESSAGES = {"connect", "open"}
AFTER_FIRST_TOKEN = {"fetch", "verify", "decode queue", "step", "decode"}
LABELS = {"gen_ai_provider_name": "baton", "gen_ai_request_model": "tiny"}


@pytest.mark.parametrize(
    ("first_s", "per_token_s", "outcome"),
    [
        (1.0, 0.1, "met"),
        (1.1, 0.1, "ttft_missed"),
        (0.5, 0.2, "itl_missed"),
        (2.0, 0.2, "both_missed"),
        (0.5, None, "met"),
        (None, None, "met"),
    ],
)
def test_each_objective_is_judged(
    first_s: float | None, per_token_s: float | None, outcome: str
) -> None:
    times = RequestTimes(9.0, first_s, per_token_s)
    assert judged(SLO, times) == outcome
    assert judged(SloConfig(), times) == "met"
    assert judged(replace(SLO, ttft_s=0.0), times) in ("met", "itl_missed")


def value(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(name, labels) or 0.0


def test_only_met_objectives_count_tokens_as_goodput() -> None:
    keeper, before = Scorekeeper("m", SLO), value("baton_goodput_tokens_total")
    keeper.record(RequestTimes(1.0, 0.5, 0.05), 7, chat=True)
    assert value("baton_goodput_tokens_total") == before + 7
    keeper.record(RequestTimes(9.0, 5.0, 0.05), 7, chat=True)
    failed = value("baton_objective_requests_total", outcome="failed")
    keeper.record(RequestTimes(9.0, 0.5, 0.05), 7, chat=True, error_type="EngineError")
    assert value("baton_goodput_tokens_total") == before + 7
    assert value("baton_objective_requests_total", outcome="failed") == failed + 1


def test_each_phase_of_a_worker_belongs_to_one_part() -> None:
    parts = [QUEUED & set(NAMES.values()), PREFILLED, MESSAGES, AFTER_FIRST_TOKEN, {NAMES[0]}]
    assert sorted(name for part in parts for name in part) == sorted(NAMES.values())


def test_the_parts_of_a_request_are_observed() -> None:
    names = [
        f"baton_request_{part}_seconds" for part in ("queue", "prefill", "decode", "inference")
    ]
    before = [value(f"{name}_sum") for name in names]
    phases = [
        Phase("place", 0.125),
        Phase("lost attempt", 0.0625),
        Phase("lost handoff", 0.0625),
        Phase("send", 9.0),  # a message's way: in no part
        Phase("credit wait", 0.25),
        Phase("prefill queue", 0.5),
        Phase("step wait", 0.125, where="prefill-0"),
        Phase("chunk", 0.5, 64, "prefill-0"),
        Phase("chunk", 0.25, 20, "prefill-0"),
    ]
    keeper, times = Scorekeeper("m", SLO), RequestTimes(15.0, 11.0, 0.05)
    keeper.record(times, 7, chat=True, phases=phases)
    keeper.record(times, 7, chat=True, phases=phases, error_type="EngineError")  # not a whole one
    after = [value(f"{name}_sum") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1.0, 0.875, 4.0, 4.875]


async def test_a_request_is_observed_once_by_each_name(router: StartRouter) -> None:
    def counts() -> list[float]:
        name = "gen_ai_server_request_duration_seconds_count"
        chat = {"gen_ai_operation_name": "chat", **LABELS}
        text = {"gen_ai_operation_name": "text_completion", **LABELS}
        return [
            value(name, error_type="", **chat),
            value(name, error_type="", **text),
            value("gen_ai_server_time_to_first_token_seconds_count", **chat),
            value("gen_ai_server_time_per_output_token_seconds_count", **chat),
            value("baton_output_tokens_count"),
            value("baton_objective_requests_total", outcome="met"),
        ]

    async def counted(before: list[float], expected: list[int]) -> None:
        """Wait until the counts have grown by so much: the answer may come before they do."""
        await eventually(lambda: [a - b for a, b in zip(counts(), before, strict=True)] == expected)

    async with router() as running:
        before = counts()
        assert (await running.chat(max_tokens=5)).status_code == 200
        await counted(before, [1, 0, 1, 1, 1, 1])
        before = counts()
        assert (await running.complete(max_tokens=1)).status_code == 200
        await counted(before, [0, 1, 0, 0, 1, 1])
        before = counts()
        assert (await running.chat(temperature=-1)).status_code == 400
        assert counts() == before  # a refused request has no latency


async def families(running: RunningRouter) -> dict[str, Metric]:
    text = (await running.http.get("/metrics")).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_label(family: Metric, label: str) -> dict[str, float]:
    return {s.labels[label]: s.value for s in family.samples if label in s.labels}


async def test_a_router_shows_its_fleet_under_known_names(router: StartRouter) -> None:
    workers = ("decode-0", "decode-1", "prefill-0")
    async with router(workers=workers, config=FAST_ROUTER) as running:
        assert (await running.chat(max_tokens=5)).status_code == 200
        found = await families(running)
        for name in (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "vllm:gpu_cache_usage_perc",
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_time_per_output_token_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
            "vllm:request_inference_time_seconds",
            "vllm:generation_tokens",
        ):
            samples = found[name].samples
            assert samples and all(s.labels["model_name"] == "tiny" for s in samples), name
        ready = by_label(found["baton_fleet_ready_workers"], "role")
        assert ready == {"prefill": 1, "decode": 2}
        finished = by_label(found["vllm:request_success"], "finished_reason")
        assert finished.keys() == {"stop", "length"}
        assert finished["length"] == value("baton_finished_choices_total", reason="length") > 0
        (running_now,) = found["vllm:num_requests_running"].samples
        assert running_now.value == 0
        own = {
            s.labels.get("le", s.name[-5:]): s.value for s in found["baton_ttft_seconds"].samples
        }
        same = found["vllm:time_to_first_token_seconds"].samples
        assert {s.labels.get("le", s.name[-5:]): s.value for s in same} == own
        roles = {s.labels["role"]: s.value for s in found["baton_role"].samples}
        assert roles == {"router": 1, "prefill": 0, "decode": 0}


@pytest.mark.parametrize(("on_workers", "running"), [(0, 0.0), (10, 0.0), (40, 7.0), (120, 9.0)])
def test_running_requests_are_this_routers_own(on_workers: int, running: float) -> None:
    """Ten were sent, twelve of all routers' wait: as many of these as its share of all."""
    standard_names.publish_router("tiny")
    metrics.ACTIVE_REQUESTS.set(11)
    metrics.WAITING_REQUESTS.set(1)
    metrics.FLEET_WAITING.labels("decode").set(12)
    metrics.FLEET_REQUESTS.set(on_workers)
    try:
        labels = {"model_name": "tiny", "engine": "0"}
        assert value("vllm:num_requests_running", **labels) == running
        assert value("vllm:num_requests_waiting", **labels) == 13
    finally:
        for gauge in (metrics.ACTIVE_REQUESTS, metrics.WAITING_REQUESTS, metrics.FLEET_REQUESTS):
            gauge.set(0)
        metrics.FLEET_WAITING.labels("decode").set(0)


async def test_waiting_requests_of_the_fleet_are_shown(router: StartRouter) -> None:
    async with router(waiting=3) as running:

        async def shown() -> bool:
            found = await families(running)
            (waiting,) = found["vllm:num_requests_waiting"].samples
            fleet = {
                s.labels["role"]: s.value for s in found["baton_fleet_waiting_requests"].samples
            }
            (requests,) = found["baton_fleet_requests"].samples
            return bool(waiting.value == 3 == fleet["decode"] and requests.value == 3)

        await eventually(shown)
