"""Handing a submission to a worker: what is computed for it, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from baton.router.fleet import fleet
from baton.router.fleet.radix_index import Holders
from baton.router.fleet.worker_view import KvFormat, WorkerView
from baton.runtime.errors import Overloaded
from baton.runtime.identity import chain
from baton.runtime.links import LinkClosed
from tests.support.dispatch_scene import DispatchScene
from tests.support.router_process import StartRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.virtual_time import on_virtual_time
from tests.support.waiting import eventually


async def test_a_prompt_is_hashed_once_and_only_with_a_worker(
    router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not twenty times a second, as a whole, by every request that waits."""
    hashed: list[int] = []
    tries: list[int] = []
    views = fleet.Fleet.views

    def count(key: bytes, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        hashed.append(len(tokens))
        return chain(key, parent, tokens, block_size)

    def look(self: fleet.Fleet) -> list[WorkerView]:
        tries.append(1)
        return views(self)

    monkeypatch.setattr(fleet, "chain", count)
    monkeypatch.setattr(fleet.Fleet, "views", look)
    async with router(workers=("prefill-0",), wait=False) as running:
        prompt = "the quick brown fox " * 40
        asking = asyncio.create_task(running.complete(prompt=prompt, max_tokens=2))
        await eventually(lambda: running.workers["prefill-0"].seen("hello"))
        # No further try may be made in this time.
        await asyncio.sleep(0.5)
        assert len(tries) <= 1 and not hashed  # none: if the index was rebuilt after its first try
        decode = ScriptedWorker(
            "decode-0", running.registry, running.vocabulary, running.workers["prefill-0"].token
        )
        await decode.start()
        try:
            answer = await asking
        finally:
            await decode.die()
        assert answer.status_code == 200
        assert hashed == [answer.json()["usage"]["prompt_tokens"]]


@on_virtual_time
async def test_what_a_full_fleet_refuses_is_not_looked_at() -> None:
    scene = DispatchScene()
    scene.fleet.waiting = 512
    with pytest.raises(Overloaded):
        await scene.start()
    assert scene.fleet.matched == 0
    scene.fleet.waiting = 0
    await scene.start()
    assert scene.fleet.matched == 1


@on_virtual_time
async def test_what_was_hashed_is_kept_until_it_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = DispatchScene()
    seen: list[dict[str, list[bytes]]] = []
    send = scene.link().send

    def note(
        tokens: Sequence[int], salt: bytes, known: dict[str, list[bytes]]
    ) -> Callable[[KvFormat], Holders]:
        seen.append(dict(known))
        known["a shape"] = [b"an identity"]
        return lambda shape: Holders()

    def broken(_: object) -> None:
        monkeypatch.setattr(scene.link(), "send", send)
        raise LinkClosed("just now")

    monkeypatch.setattr(scene.fleet, "holders", note)
    monkeypatch.setattr(scene.link(), "send", broken)
    active_request = await scene.start()
    assert seen == [{}, {"a shape": [b"an identity"]}]
    (submission,) = scene.dispatcher.attempts.values()
    assert not submission.identities  # another attempt may have other tokens
    scene.dispatcher.cancel(active_request)
