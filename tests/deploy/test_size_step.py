"""A step of the number of workers under a leadership that ends in it, and calls that do not end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.deploy.control.kubernetes_calls import API_TIMEOUT_S
from baton.deploy.host.kubernetes_api import KubernetesApi
from baton.planner.control import redis_calls, size_step
from baton.planner.control.leadership import TERM_S
from baton.planner.control.order_rules import ORDER_TIMEOUT_S
from baton.planner.control.redis_calls import call_redis
from baton.planner.control.size_step import CALL_S, STEP_S
from baton.planner.controller import STALE_S
from baton.runtime.errors import Unavailable
from tests.support.pods.secrets_server import SecretsServer
from tests.support.sized_scene import SizedScene

SHRINK = ["check 4", "drain d3.0", "resize 4"]  # all calls of a step with effect, in order


async def shrink(scene: SizedScene) -> str:
    """Let the fleet decide to shrink, once; return why it did not, or nothing."""
    with capture_logs() as logs:
        for _ in range(60):
            await scene.calm(1)
            failed = [str(e["reason"]) for e in logs if e["event"] == "workers not asked for"]
            if failed or scene.pool.calls[-1:] == SHRINK[-1:]:
                return "; ".join(failed)
    raise AssertionError("no step was decided")


def ends(scene: SizedScene) -> None:
    """Another controller has the leadership from now on."""
    scene.leadership.leads = False


def begins_again(scene: SizedScene) -> None:
    """The lease had ended, and this controller got the next term."""
    scene.leadership.term += 1


def lasts_short(scene: SizedScene) -> None:
    """Redis has not answered the renewals: the lease ends before a call would."""
    scene.leadership.remaining_s = CALL_S - 0.1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (ends, "this controller does not lead any more"),
        (begins_again, "it has led for less than 10 s: the one before may have ordered"),
        (lasts_short, "its leadership ends before an order may: within 4 s"),
    ],
)
@pytest.mark.parametrize("amid", ["check", "drain"])
async def test_a_step_stops_before_the_call_after_its_lease(
    amid: str, change: Callable[[SizedScene], None], words: str
) -> None:
    scene = SizedScene()
    if amid == "drain":
        scene.amid_drain = lambda: change(scene)
    else:
        scene.pool.amid[amid] = lambda: change(scene)
    reason = await shrink(scene)
    assert scene.pool.calls == SHRINK[: 1 if amid == "check" else 2] and scene.pool.asked == 5
    assert words in reason


async def test_a_step_is_not_begun_without_the_leadership() -> None:
    """It ends while the number is read."""
    scene = SizedScene()
    await scene.pass_by(15)
    left = scene.leadership.left

    def end_below_the_least() -> None:
        ends(scene)
        scene.pool.asked = 1

    scene.pool.amid["count"] = end_below_the_least
    await scene.pass_by(1)
    assert scene.sizes.decision is not None and scene.sizes.decision.reason == "grow"
    assert scene.pool.calls == [] and scene.leadership.left == left


async def test_the_lease_is_renewed_before_each_call() -> None:
    scene = SizedScene()
    renewed: list[int] = []

    def note() -> None:
        renewed.append(scene.leadership.asked)

    scene.amid_drain = note
    scene.pool.amid |= {"check": note, "resize": note}
    assert await shrink(scene) == "" and scene.pool.calls == SHRINK
    assert len(set(renewed)) == 3, renewed


async def test_old_reports_stop_a_step_until_a_worker_drains() -> None:
    """Once it drains its number has to follow: else its pod starts it again."""
    scene = SizedScene()

    def late() -> None:
        scene.late_s += STALE_S + 1

    scene.pool.amid["check"] = late
    assert "the reports are" in await shrink(scene) and scene.pool.calls == SHRINK[:1]
    scene = SizedScene()
    scene.amid_drain = late
    assert await shrink(scene) == "" and scene.pool.calls == SHRINK


@pytest.mark.parametrize(
    ("call", "made"), [("check", SHRINK[:1]), ("resize", SHRINK), ("drain", SHRINK[:2])]
)
async def test_a_call_without_an_end_ends_the_step(
    call: str, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size_step, "CALL_S", 0.02)
    scene = SizedScene()
    scene.pool.hangs = call
    reason = await shrink(scene)
    assert "has no answer after 0.02 s; what it asked for may still happen" in reason
    assert scene.pool.calls == made
    await scene.calm(5)
    assert scene.pool.calls == made and scene.sizes.decision is not None
    assert scene.sizes.decision.reason == "failed"


async def test_a_step_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_step, "STEP_S", 0.02)
    scene = SizedScene()
    scene.pool.hangs = "check"
    assert "the step was not complete after 0.02 s" in await shrink(scene)


async def test_a_reading_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later readings would wait for it for ever."""
    monkeypatch.setattr(size_step, "CALL_S", 0.02)
    scene = SizedScene()
    scene.pool.hangs = "count"
    with capture_logs() as logs:
        await scene.pass_by(2)
    assert [e["event"] for e in logs if "not read" in e["event"]] == ["number of workers not read"]
    scene.pool.hangs = ""
    await scene.pass_by(2)
    assert scene.sizes.decision is not None


def test_a_term_outlasts_the_longest_call() -> None:
    assert API_TIMEOUT_S < CALL_S <= ORDER_TIMEOUT_S < TERM_S < STEP_S


async def test_a_call_of_redis_is_bounded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_calls, "ANSWER_S", 0.02)
    with pytest.raises(Unavailable, match="has not answered within 0.02 s"):
        await call_redis(asyncio.Event().wait())


def test_a_request_that_would_leave_too_late_is_not_sent(tmp_path: Path) -> None:
    """Its connection took longer than the caller leads."""
    server = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    try:
        server.roles["controller"] = [
            {"resources": ["statefulsets/scale"], "verbs": ["get", "patch"]}
        ]
        server.scales.put("w", 3)
        api = KubernetesApi(
            "127.0.0.1", server.port, server.mounted_account("controller", tmp_path / "a")
        )
        path = "/apis/apps/v1/namespaces/llm/statefulsets/w/scale"
        body = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": 4}}
        with pytest.raises(Unavailable, match="connected too late, nothing was sent"):
            api.call("PATCH", path, body, may_send=lambda: False)
        assert server.scales.patched == []
        api.call("PATCH", path, body, may_send=lambda: True)
        assert server.scales.patched == [("w", 4)]
    finally:
        server.close()
