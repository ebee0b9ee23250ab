"""Why a prompt is prefilled where it is: each reason, its counter, and the costs behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import Counter

from baton.router.dispatch.dispatcher import Dispatcher
from baton.router.dispatch.retry_policy import _reason as migration_reason
from baton.router.fleet.explain import Explanation, explain
from baton.router.fleet.placement import FleetView, PlacementInput, open_groups
from baton.router.fleet.placement import place as place_on
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.request_need import Need
from baton.router.fleet.roster import Roster
from baton.router.fleet.slow_start import SlowStart
from baton.router.fleet.worker_view import KvFormat
from baton.router.requests import loop_budget, refusals
from baton.router.requests.validated_request import ValidatedRequest
from baton.runtime import errors, metric_factory, metrics
from baton.runtime.cluster_config import SloConfig
from baton.runtime.config import PlacementMode
from tests.support.dispatch_scene import DispatchScene, failed, output
from tests.support.json_values import JsonObject
from tests.support.metric_values import metric_value
from tests.support.placement_scene import NEED, Seen, place, view
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

D0, P0 = view("decode-0"), view("prefill-0")
NEWER = D0.kv_format._replace(terms="protocol 2")  # after an upgrade
SMALL = replace(NEED, tokens=20)
LONG_NEED = replace(NEED, tokens=8200, most_tokens=8300)  # to READ it all costs more


def decisions() -> dict[tuple[str, str], float]:
    (family,) = metrics.DECISIONS_MADE.collect()
    return {
        (sample.labels["decision"], sample.labels["reason"]): sample.value
        for sample in family.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("need", "workers", "mode", "expected"),
    [
        (NEED, [D0, P0], "auto", (False, "cheaper")),
        (NEED, [D0, P0], "disaggregated", (False, "configured")),
        (SMALL, [D0, P0], "disaggregated", (False, "configured")),
        (NEED, [D0, P0], "local", (True, "configured")),
        (SMALL, [D0, P0], "auto", (True, "short")),
        (NEED, [replace(D0, held_blocks=60), P0], "auto", (True, "cached")),
        (LONG_NEED, [replace(D0, held_blocks=508), P0], "auto", (True, "cached")),
        (LONG_NEED, [D0, replace(P0, queued_tokens=1 << 20, running=8)], "auto", (True, "cheaper")),
        (NEED, [D0], "auto", (True, "no_prefill_worker")),
        (
            NEED,
            [D0, replace(P0, kv_format=KvFormat("g", "float32", 16))],
            "auto",
            (True, "incompatible"),
        ),
        (NEED, [D0, replace(P0, kv_format=NEWER)], "auto", (True, "incompatible")),
        (NEED, [D0, replace(P0, total_blocks=10)], "auto", (True, "too_large")),
        (NEED, [D0, replace(P0, draining=True)], "auto", (True, "left")),
        (replace(NEED, left=frozenset({P0.boot_id})), [D0, P0], "auto", (True, "left")),
    ],
)
def test_each_reason_has_its_case(
    need: Need, workers: Sequence[Seen], mode: PlacementMode, expected: tuple[bool, str]
) -> None:
    found = place(need, workers, mode)
    assert (found.local, found.reason) == expected
    assert ("local" if found.local else "disaggregated", found.reason) in metric_factory.DECISIONS


@on_virtual_time
async def test_a_placement_counts_its_reason_once() -> None:
    before = decisions()
    await DispatchScene("decode-0").start()
    changed = {pair: count - before[pair] for pair, count in decisions().items()}
    assert {pair: count for pair, count in changed.items() if count} == {
        ("local", "no_prefill_worker"): 1
    }


@on_virtual_time
async def test_a_migration_counts_why_the_worker_was_left() -> None:
    scene = DispatchScene("decode-0", "decode-1")
    lost = metric_value(metrics.MIGRATIONS.labels("worker_lost"))
    full = metric_value(metrics.MIGRATIONS.labels("overloaded"))
    await scene.start()
    scene.give(output(0, 10))
    scene.link(0).up = False
    scene.dispatcher.lost(scene.link(0), None, "dead")
    await scene.settle_down()
    assert metric_value(metrics.MIGRATIONS.labels("worker_lost")) == lost + 1
    scene.link(0).up = True
    scene.give(failed("Overloaded", True, attempt=2), number=1)
    await asyncio.sleep(2.0)  # a pause before an overloaded worker is asked again
    assert metric_value(metrics.MIGRATIONS.labels("overloaded")) == full + 1


def known(counter: Counter, label: str) -> set[str]:
    return {sample.labels[label] for sample in next(iter(counter.collect())).samples}


def classes(root: type[errors.BatonError] = errors.BatonError) -> list[type[errors.BatonError]]:
    """All error classes of the module; tests' own subclasses are not among them."""
    below = [found for child in root.__subclasses__() for found in classes(child)]
    return [kind for kind in (root, *below) if kind.__module__ == errors.__name__]


def test_every_error_has_a_known_reason() -> None:
    assert len(classes()) > 20
    for kind in classes():
        error = kind("words")
        assert refusals.refusal_reason(error) in known(metrics.REFUSALS, "reason")
        assert migration_reason(error) in known(metrics.MIGRATIONS, "reason")


def test_errors_of_one_parent_have_different_reasons() -> None:
    assert refusals.refusal_reason(errors.RateLimited("")) == "rate_limited"
    assert refusals.refusal_reason(errors.Overloaded("")) == "overloaded"
    assert refusals.refusal_reason(errors.ContextExceeded("")) == "context_exceeded"
    assert migration_reason(errors.StalePlacement("")) == "stale_placement"
    assert migration_reason(errors.Draining("")) == "draining"


async def test_refusals_are_counted_by_the_clients_error(router: StartRouter) -> None:
    def counted(reason: str) -> float:
        return metric_value(metrics.REFUSALS.labels(reason))

    config = replace(FAST_ROUTER, api_keys=("secret-key-of-the-test",))
    async with router(config=config) as running:
        before = counted("unauthenticated")
        assert (await running.chat()).status_code == 401
        assert counted("unauthenticated") == before + 1
        running.http.headers["authorization"] = "Bearer secret-key-of-the-test"
        for fields, reason in (
            ({"temperature": -1}, "invalid"),
            ({"model": "another"}, "not_found"),
            ({"max_tokens": 10**6}, "context_exceeded"),
        ):
            before, total = counted(reason), metric_value(metrics.REQUESTS.labels("refused"))
            assert (await running.chat(**fields)).is_client_error
            assert counted(reason) == before + 1, reason
            assert metric_value(metrics.REQUESTS.labels("refused")) == total + 1


LONG = {"prompt": "the quick brown fox " * 60}


async def test_explain_returns_the_costs_and_places_nothing(router: StartRouter) -> None:
    async with router(workers=("decode-0", "decode-1", "prefill-0")) as running:
        before = decisions()
        reply = await running.http.post("/v1/completions/explain", json={"model": "tiny", **LONG})
        assert reply.status_code == 200, reply.text
        (found,) = reply.json()["prompts"]
        assert (found["decision"], found["reason"]) == ("disaggregated", "cheaper")
        assert found["prefill_candidates"] == ["prefill-0"]
        assert found["prefill_cost"]["remote"] < found["prefill_cost"]["here"]
        names = [each["worker_id"] for each in found["decode_costs"]["workers"]]
        assert sorted(names) == ["decode-0", "decode-1"] and names[0] == found["decode_worker"]
        (prefill,) = found["prefill_costs"]["workers"]
        assert prefill["uncached_tokens"] == found["prompt_tokens"]
        assert prefill["cost"] == pytest.approx(sum(prefill["parts"].values()))
        assert prefill["parts"]["compute"] == prefill["cost"] > 0
        assert set(found["decode_costs"]["workers"][0]["parts"]) == {
            "batch",
            "queue",
            "credit",
            "prefill",
            "slow_start",
        }
        assert found["timing"] == "prior"
        assert found["read_from"] is None
        assert decisions() == before
        assert not any(worker.seen("submit") for worker in running.workers.values())
        assert LONG["prompt"][:9] not in reply.text


async def test_explain_logs_no_text_of_a_prompt(
    router: StartRouter, capfd: pytest.CaptureFixture[str]
) -> None:
    logged = ""

    def ended() -> bool:
        nonlocal logged
        logged += "".join(capfd.readouterr())
        return "request ended" in logged

    async with router() as running:
        for path in ("/v1/completions/explain", "/v1/completions"):
            body = {"model": "tiny", "prompt": "xylophone-4711", "max_tokens": 2}
            assert (await running.http.post(path, json=body)).status_code == 200
        await eventually(ended)  # of the second: the log of both has been written
    assert "4711" not in logged


async def test_explain_answers_a_chat_and_several_prompts(router: StartRouter) -> None:
    async with router() as running:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        reply = await running.http.post("/v1/chat/completions/explain", json=chat)
        (found,) = reply.json()["prompts"]
        assert (found["decision"], found["reason"]) == ("local", "no_prefill_worker")
        assert found["prefill_cost"]["remote"] is None
        several = {"model": "tiny", "prompt": ["one", "two"]}
        reply = await running.http.post("/v1/completions/explain", json=several)
        assert len(reply.json()["prompts"]) == 2
        chosen = (await running.chat(max_tokens=2)).json()
        assert chosen["choices"][0]["finish_reason"] == "length"


async def test_explain_takes_a_turn_of_the_loop_for_each_prompt(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compared with all workers: many of them at once would hold tokens up."""
    monkeypatch.setattr(loop_budget, "SHARE_S", 1e-9)
    turns, explain = 0, Dispatcher.explain
    begun: list[int] = []

    def noted(dispatcher: Dispatcher, request: ValidatedRequest) -> Explanation:
        begun.append(turns)
        return explain(dispatcher, request)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(Dispatcher, "explain", noted)
    async with router() as running:
        counting = asyncio.create_task(count())
        several = {"model": "tiny", "prompt": ["one", "two", "three", "four"]}
        reply = await running.http.post("/v1/completions/explain", json=several)
        counting.cancel()
    assert reply.status_code == 200 and len(set(begun)) == 4


async def test_explain_names_the_obstacle_of_a_worker(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, placement="disaggregated")
    async with router(workers=("decode-0", "prefill-0"), config=config) as running:
        running.workers["prefill-0"].draining = True
        found: JsonObject = {}

        async def left() -> bool:
            body = {"model": "tiny", **LONG}
            reply = await running.http.post("/v1/completions/explain", json=body)
            found.update(reply.json()["prompts"][0])
            return bool(found["reason"] == "left")

        await eventually(left)
        assert found["decision"] == "local"
        (prefill,) = found["prefill_costs"]["workers"]
        assert prefill["obstacle"] == "draining"


async def test_explain_names_a_worker_in_its_slow_start(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deferred(self: SlowStart, roster: Roster, now_s: float) -> frozenset[bytes]:
        return frozenset(e.boot_id for e in roster.views() if e.worker_id == "decode-1")

    monkeypatch.setattr(SlowStart, "deferred", deferred)
    async with router(workers=("decode-0", "decode-1")) as running:
        body = {"model": "tiny", **LONG}
        reply = await running.http.post("/v1/completions/explain", json=body)
        (found,) = reply.json()["prompts"]
        assert found["decode_worker"] == "decode-0"
        starts = {
            each["worker_id"]: each["parts"]["slow_start"]
            for each in found["decode_costs"]["workers"]
        }
        assert starts == {"decode-0": 0.0, "decode-1": 600.0}


async def local_s(running: RunningRouter, waiting: int) -> float:
    """Return the cost of a local prefill, once so many requests are reported to wait."""
    found: JsonObject = {}

    async def reported() -> bool:
        body = {"model": "tiny", **LONG}
        reply = await running.http.post("/v1/completions/explain", json=body)
        found.update(reply.json()["prompts"][0])
        return bool(found["decode_costs"]["workers"][0]["waiting"] == waiting)

    await eventually(reported)
    return float(found["prefill_cost"]["here"])


async def test_explain_counts_what_streams_lose_of_their_objective(router: StartRouter) -> None:
    """Four requests wait; the objective leaves the steps of a prompt no room."""
    costs = []
    for slo in (SloConfig(), SloConfig(itl_s=0.006)):
        async with router(workers=("decode-0",), slo=slo, waiting=4) as running:
            costs.append(await local_s(running, waiting=4))
    assert costs[1] > 2 * costs[0]


async def test_explain_needs_a_key_and_a_decode_worker(router: StartRouter) -> None:
    config = replace(FAST_ROUTER, api_keys=("secret-key-of-the-test",))
    async with router(workers=(), config=config, wait=False) as running:
        url, body = "/v1/completions/explain", {"model": "tiny", "prompt": "x"}
        assert (await running.http.post(url, json=body)).status_code == 401
        running.http.headers["authorization"] = "Bearer secret-key-of-the-test"
        reply = await running.http.post(url, json=body)
        assert reply.status_code == 503 and "decode worker" in reply.text
        assert (await running.http.post(url, json={"model": "tiny"})).status_code == 400


def test_explain_prices_the_candidate_whose_circuit_is_open() -> None:
    """It is the only one, so it was chosen."""
    roster = Roster()
    for name in ("decode-0", "prefill-0"):
        roster.put(view(name))
    fleet = FleetView(roster, frozenset({b"prefill-0"}))
    groups = open_groups(NEED, fleet)
    given = PlacementInput(NEED, fleet, groups, lambda kv_format: Holders(), "disaggregated")
    found = explain(given, place_on(given))
    assert [each.worker_id for each in found.placement.candidates] == ["prefill-0"]
    assert found.remote_us is not None


@pytest.mark.parametrize(
    ("worker", "error", "text"),
    [
        (view("prefill-0"), errors.Unavailable, "no decode worker is there"),
        (view("decode-0", draining=True), errors.Unavailable, "no decode worker is there"),
        (view("decode-0", waiting=512), errors.Overloaded, "queue is full"),
        (view("decode-0", total_blocks=10, free_blocks=10), errors.InvalidRequest, "160 tokens"),
    ],
)
def test_a_request_that_no_worker_can_take_is_refused(
    worker: Seen, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        place(NEED, [worker], "auto")
