"""Handing a submission to a worker: what is computed for it, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from baton.router import fleet
from baton.runtime.identity import chain
from baton.simulation.scripted_worker import ScriptedWorker


async def test_a_prompt_is_hashed_once_while_it_waits_for_a_worker(
    router: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not twenty times a second, as a whole, by every request that waits."""
    hashed: list[int] = []
    looks: list[int] = []
    views = fleet.Fleet.views

    def count(key: bytes, parent: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
        hashed.append(len(tokens))
        return chain(key, parent, tokens, block_size)

    def look(self: fleet.Fleet, *arguments: Any) -> Any:
        looks.append(1)
        return views(self, *arguments)

    monkeypatch.setattr(fleet, "chain", count)
    monkeypatch.setattr(fleet.Fleet, "views", look)
    async with router(workers=("prefill-0",), wait=False) as running:
        prompt = "the quick brown fox " * 40
        asking = asyncio.create_task(running.complete(prompt=prompt, max_tokens=2))
        await eventually(lambda: len(hashed) == 1)
        seen = len(looks)
        await eventually(lambda: len(looks) >= seen + 4)
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


async def test_what_was_hashed_is_not_kept_once_it_is_placed(
    scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of()
    kept: list[dict[str, list[bytes]]] = []
    views = scene.fleet.views

    def note(tokens: Any, salt: bytes, known: dict[str, list[bytes]]) -> Any:
        known["a shape"] = [b"an identity"]
        kept.append(known)
        return views(tokens, salt, known)

    monkeypatch.setattr(scene.fleet, "views", note)
    await scene.start()
    assert kept == [{}]
