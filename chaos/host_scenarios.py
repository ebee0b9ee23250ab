"""Faults of clusters on several hosts: a worker, a router, a host, Redis and Ray's head are killed,
paused, cut off or flushed.

`hosts-*` and `redis-*` run on processes of their own, `ray-*` on workers that `baton fleet` keeps
(hosts.py); for `hosts-cut-router` one router has a host of its own. A host that is killed loses
every process at once, and its link. What a fault must not cost is judged as in scenarios.py; what
it has to show, or the run is void, is looked at here.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from statistics import median

from chaos.hosts import LONE_HOST, REDIS, WORKERS, Hosts
from chaos.ray_nodes import HEAD
from chaos.stage import Scenario, Stage, bound

OUTAGE_S = 20.0  # longer than an entry of the registry lasts
NOTICED_S = 20.0  # for a router to notice that Redis is back
POLL_S = 0.2
STOPPED_S = 0.7  # below the time in which a call of the registry's client fails
ANOTHER_SETTING = "worker.drain_s=61"  # so that every worker is replaced


def _hosts(stage: Stage) -> Hosts:
    assert stage.hosts is not None
    return stage.hosts


async def _lose_host(stage: Stage, host: str) -> None:
    assert stage.network is not None
    hosts = _hosts(stage)
    await asyncio.gather(
        stage.kill(*hosts.on(host)),
        *([stage.do(hosts.lose_node, host)] if hosts.nodes is not None else []),
    )
    await stage.do(stage.network.cut, host, "both")
    try:
        await stage.hold()
    finally:
        await stage.do(stage.network.heal, host)
    if hosts.nodes is not None:
        await stage.do(hosts.start_node, host)
    await stage.back()


async def _pause_host(stage: Stage, host: str) -> None:
    names = _hosts(stage).on(host)
    for name in names:
        stage.cluster.kill(name, signal.SIGSTOP)
    try:
        await stage.hold()
    finally:
        for name in names:
            stage.cluster.kill(name, signal.SIGCONT)
    await stage.whole()


async def _outage(
    stage: Stage, begin: Callable[[Stage], None], end: Callable[[Stage], None], *lost: str
) -> None:
    """Redis cannot be used; workers `lost` are killed and started again in that time."""
    await stage.do(begin, stage)
    try:
        await stage.kill(*lost)
        for name in lost:
            await stage.do(stage.cluster.start_worker, name.split("-")[0], name)
        await stage.hold()
        unnoticed = [name for name in stage.cluster.urls if await _registry_up(stage, name)]
    finally:
        await stage.do(end, stage)
    if unnoticed:
        stage.void = f"{', '.join(unnoticed)} did not notice the outage"
    await stage.whole()
    until_s = asyncio.get_running_loop().time() + NOTICED_S
    for name in stage.cluster.urls:
        while not await _registry_up(stage, name):
            if asyncio.get_running_loop().time() > until_s:
                stage.broken.append(f"{name} does not notice that Redis is back")
                return
            # A router's metrics can only be read again.
            await asyncio.sleep(POLL_S)


async def _registry_up(stage: Stage, name: str) -> bool:
    return bool(await stage.do(stage.cluster.metric, name, "baton_registry_up"))


def _kill_redis(stage: Stage) -> None:
    _hosts(stage).redis.kill()


def _start_redis(stage: Stage) -> None:
    _hosts(stage).redis.start()


def _pause_redis(stage: Stage) -> None:
    _hosts(stage).redis.pause()


def _resume_redis(stage: Stage) -> None:
    _hosts(stage).redis.resume()


def _cut_redis(stage: Stage) -> None:
    assert stage.network is not None
    stage.network.cut(REDIS, "both")


def _heal_redis(stage: Stage) -> None:
    assert stage.network is not None
    stage.network.heal(REDIS)


async def _flush(stage: Stage) -> None:
    """All entries are gone at once; `whole` waits until every worker has registered again."""
    if not await stage.do(_hosts(stage).redis.flush):
        stage.void = "there was no entry to flush"
    await stage.whole()
    await stage.hold()


async def _slow_redis(stage: Stage) -> None:
    """Stopped and let go on in turn: each call takes most of a second, and few fail."""
    redis = _hosts(stage).redis
    loop, answers = asyncio.get_running_loop(), list[float]()
    until_s = loop.time() + stage.hold_s
    try:
        while loop.time() < until_s:
            redis.pause()
            asked = asyncio.create_task(stage.do(redis.ping_s))
            # A server that stops and goes on is the fault.
            await asyncio.sleep(STOPPED_S)
            redis.resume()
            answers.append(await asked)
    finally:
        redis.resume()
    stage.notes.append(f"it answered after {median(answers):.2f} s")
    await stage.whole()


async def _full_redis(stage: Stage) -> None:
    """It refuses every entry; announcements still pass."""
    redis = _hosts(stage).redis
    await stage.do(redis.limit_memory, 1)
    try:
        await stage.hold()
        up = [name for name in WORKERS if await _registry_up(stage, name)]
    finally:
        await stage.do(redis.limit_memory, 0)
    if up:
        stage.void = f"{', '.join(up)} noticed nothing"
    await stage.whole()


async def _lose_head(stage: Stage) -> None:
    hosts = _hosts(stage)
    before = await stage.do(hosts.boots)
    await stage.do(hosts.lose_head)
    await stage.hold()
    await stage.do(hosts.return_head)
    await _serve_on(stage, before)


async def _pause_head(stage: Stage) -> None:
    hosts = _hosts(stage)
    before = await stage.do(hosts.boots)
    await stage.do(hosts.signal_head, signal.SIGSTOP)
    try:
        await stage.hold()
    finally:
        await stage.do(hosts.signal_head, signal.SIGCONT)
    await _serve_on(stage, before)


async def _cut_head(stage: Stage) -> None:
    before = await stage.do(_hosts(stage).boots)
    await stage.cut(HEAD, "both")
    await _serve_on(stage, before)


async def _serve_on(stage: Stage, before: dict[str, str]) -> None:
    """Ray's head has no part in serving: every worker is the boot that it was."""
    await asyncio.sleep(stage.hold_s)  # for a driver that would replace them
    await stage.whole()
    if (after := await stage.do(_hosts(stage).boots)) != before:
        stage.broken.append(f"workers were started again: {before} became {after}")


async def _replace_all(stage: Stage) -> None:
    """A driver with another setting replaces every worker, one after the other."""
    hosts = _hosts(stage)
    before = set((await stage.do(hosts.boots)).values())
    await stage.do(hosts.start_driver, ANOTHER_SETTING)
    await stage.do(
        hosts.until_registered,
        lambda boots: len(boots) == len(WORKERS) and not before & set(boots.values()),
    )
    await stage.whole()


HOSTS = (
    Scenario("hosts-kill-decode", "kill -9 of a decode worker",
             bound(Stage.strike, "decode-0"), "hosts"),
    Scenario("hosts-kill-prefill", "kill -9 of a prefill worker",
             bound(Stage.strike, "prefill-0"), "hosts"),
    Scenario("hosts-pause-decode", "SIGSTOP of a decode worker",
             bound(Stage.pause, "decode-0"), "hosts"),
    Scenario("hosts-cut-decode", "the only worker of a host is cut off",
             bound(Stage.cut, "host-2", "both"), "hosts", settle_s=3.5),
    Scenario("hosts-kill-router", "kill -9 of a router", bound(Stage.strike, "router"), "hosts",
             may_cut=("router",)),
    Scenario("hosts-pause-router", "SIGSTOP of a router", bound(Stage.pause, "router"), "hosts"),
    Scenario("hosts-kill-host", "a host with a router and a worker of each role is killed",
             bound(_lose_host, "host-0"), "hosts", may_cut=("router",)),
    Scenario("hosts-pause-host", "SIGSTOP of every process of that host",
             bound(_pause_host, "host-0"), "hosts"),
    Scenario("hosts-cut-host", "link of that host down",
             bound(Stage.cut, "host-0", "both"), "hosts",
             settle_s=3.5),
    Scenario("hosts-cut-router", "a router, alone on its host, is cut off",
             bound(Stage.cut, LONE_HOST, "both"), "lone-router", settle_s=3.5),
    Scenario("redis-kill", "Redis killed, and started again empty",
             bound(_outage, _kill_redis, _start_redis), "hosts", hold_s=OUTAGE_S),
    Scenario("redis-pause", "SIGSTOP of Redis",
             bound(_outage, _pause_redis, _resume_redis), "hosts", hold_s=OUTAGE_S),
    Scenario("redis-cut", "link of Redis down",
             bound(_outage, _cut_redis, _heal_redis), "hosts", hold_s=OUTAGE_S),
    Scenario("redis-flush", "Redis flushed", _flush, "hosts"),
    Scenario("redis-slow", "each call of Redis takes 0.7 s", _slow_redis, "hosts", hold_s=OUTAGE_S),
    Scenario("redis-full", "Redis has no memory left", _full_redis, "hosts", hold_s=OUTAGE_S),
    Scenario("redis-kill-decode", "a decode worker killed while Redis is down, linked after it",
             bound(_outage, _kill_redis, _start_redis, "decode-0"), "hosts", hold_s=OUTAGE_S),
)  # fmt: skip
RAY = (
    Scenario("ray-kill-head", "Ray's head and the driver killed",
             _lose_head, "ray"),
    Scenario("ray-pause-head", "SIGSTOP of Ray's head and the driver", _pause_head, "ray"),
    Scenario("ray-cut-head", "link of Ray's head down", _cut_head, "ray", hold_s=10.0),
    Scenario("ray-kill-host", "a node of Ray with a router is killed",
             bound(_lose_host, "host-1"), "ray", hold_s=OUTAGE_S, may_cut=("router-1",)),
    Scenario("ray-roll", "every worker replaced in turn, by a driver with another setting",
             _replace_all, "ray"),
)  # fmt: skip
