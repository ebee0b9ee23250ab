"""Where the prompts of the last minutes were prefilled, and the warnings when no KV moves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.deploy.cli import handoff_check
from baton.deploy.cli.doctor import Finding
from baton.proto import worker_pb2
from baton.router.fleet import recent_prompts
from baton.router.fleet.recent_prompts import SLOT_S, WINDOW_S, RecentPrefills
from tests.support.dispatch_scene import DispatchScene, output
from tests.support.router_process import FAST_ROUTER, RunningRouter, StartRouter
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually

WORKERS = ("prefill-0", "decode-0")
CONFIG = replace(FAST_ROUTER, placement="disaggregated")


def test_prompts_are_forgotten_after_the_window() -> None:
    recent = RecentPrefills()
    recent.add("moved", 0.0)
    for second in range(200):
        recent.add("short", 100.0 + second)
    assert recent.counts(WINDOW_S) == {"moved": 1, "short": 200}
    assert recent.counts(WINDOW_S + 1) == {"short": 200}
    assert recent.counts(300 + WINDOW_S + SLOT_S) == {}


def counts(scene: DispatchScene) -> dict[str, int]:
    return scene.fleet.recent_prefills.counts(asyncio.get_running_loop().time())


@on_virtual_time
async def test_a_prompt_counts_once_its_kv_is_there() -> None:
    scene = DispatchScene("decode-0", "prefill-0", placement="disaggregated")
    await scene.start(choices=2)
    scene.give(output(0), output(0, choice=1))  # the last blocks are not there yet
    assert counts(scene) == {}
    scene.give(output(1))
    scene.give(output(1, choice=1), output(2))
    assert counts(scene) == {"moved": 1}


@on_virtual_time
async def test_a_choice_of_one_token_tells_of_no_handoff() -> None:
    """Its decode worker needs none of the KV: that of another choice counts."""
    scene = DispatchScene("decode-0", "prefill-0", placement="disaggregated")
    await scene.start()
    scene.give(output(0, end=worker_pb2.LENGTH))
    assert counts(scene) == {}
    await scene.start(choices=2)
    scene.give(output(0, end=worker_pb2.STOP), output(0, choice=1))
    assert counts(scene) == {}
    scene.give(output(1, choice=1))
    assert counts(scene) == {"moved": 1}


@on_virtual_time
async def test_a_local_prompt_of_one_token_counts_at_its_end() -> None:
    scene = DispatchScene("decode-0", "prefill-0", placement="local")
    await scene.start()
    scene.give(output(0, end=worker_pb2.LENGTH))
    assert counts(scene) == {"configured": 1}


@on_virtual_time
async def test_a_handoff_that_fails_counts_as_failed() -> None:
    scene = DispatchScene("decode-0", "prefill-0", placement="disaggregated")
    await scene.start()
    scene.give(output(0))
    scene.tell(prefill_boot_id=b"", failed_boot_ids=[b"prefill-0"])  # its blocks never came
    scene.give(output(1))
    assert counts(scene) == {"failed": 1}


@on_virtual_time
async def test_a_local_prompt_counts_by_its_reason() -> None:
    scene = DispatchScene("decode-0", "prefill-0", placement="local")
    await scene.start()
    scene.give(output(0), output(1))
    assert counts(scene) == {"configured": 1}


async def finding(running: RunningRouter) -> Finding:
    """What doctor finds of this router, from its /metrics."""
    text = (await running.http.get("/metrics")).text
    return handoff_check.judged("here", handoff_check.parsed(text))


async def test_doctor_warns_when_all_handoffs_fail(router: StartRouter) -> None:
    async with router(workers=WORKERS, config=CONFIG, loses_handoffs=True) as running:
        for _ in range(3):
            await running.complete(max_tokens=3)
        found = await finding(running)
    assert found.level == "warn" and "KV moved for 0 of 3 prompts: failed 3" in found.found
    assert "handoff failed" in found.remedy


async def test_an_early_handoff_does_not_silence_doctor(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with router(workers=WORKERS, config=CONFIG) as running:
        await running.complete(max_tokens=3)
        running.workers["decode-0"].loses_handoffs = True
        await running.complete(max_tokens=3)
        found = await finding(running)
        assert found.level == "ok" and "KV moved for 1 of 2 prompts" in found.found
        monkeypatch.setattr(recent_prompts, "WINDOW_S", 0.2)  # its minutes pass
        monkeypatch.setattr(recent_prompts, "SLOT_S", 0.01)

        async def warned() -> bool:
            await running.complete(max_tokens=3)
            return (await finding(running)).level == "warn"

        await eventually(warned)
