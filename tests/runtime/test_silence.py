"""How long a peer was silent: without the time in which this process stood still."""

from __future__ import annotations

import asyncio

from baton.runtime.silence import Silence
from tests.support.virtual_time import on_virtual_time, stand_still


@on_virtual_time
async def test_silence_ends_after_its_limit_and_restarts_with_messages() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    silence = Silence(0.2)
    await silence.sleep(0.1)
    assert silence.left_s() > 0
    silence.record_message()
    while silence.left_s() > 0:
        await silence.sleep(0.05)
    assert 0.299 < loop.time() - began_s < 0.301


@on_virtual_time
async def test_a_sleep_ends_at_the_limit_at_the_latest() -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    silence = Silence(0.1)
    async with asyncio.timeout(20):
        while silence.left_s() > 0:
            await silence.sleep(3600)
    assert 0.099 < loop.time() - began_s < 0.101


@on_virtual_time
async def test_what_its_sleep_is_late_by_does_not_count() -> None:
    silence = Silence(0.5)
    sleeping = asyncio.create_task(silence.sleep(0.05))
    await asyncio.sleep(0)
    stand_still(0.7)
    await sleeping
    assert 0.44 < silence.left_s() < 0.46  # the sleep itself does


@on_virtual_time
async def test_a_word_is_not_put_into_the_future_by_a_late_sleep() -> None:
    silence = Silence(0.5)
    sleeping = asyncio.create_task(silence.sleep(0.05))
    await asyncio.sleep(0)
    stand_still(0.3)
    silence.record_message()
    await sleeping
    assert silence.left_s() <= 0.5


@on_virtual_time
async def test_silence_is_reported_without_late_sleeps() -> None:
    silence = Silence(5.0)
    assert silence.so_far_s() < 0.01
    await silence.sleep(0.1)
    assert 0.09 < silence.so_far_s() < 0.11
    sleeping = asyncio.create_task(silence.sleep(0.05))
    await asyncio.sleep(0)
    stand_still(0.7)
    await sleeping
    assert 0.14 < silence.so_far_s() < 0.16
    silence.record_message()
    assert silence.so_far_s() < 0.1
