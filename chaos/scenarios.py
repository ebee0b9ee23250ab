"""The faults, one scenario each: what is done to which process, and what it must not cost. Those of
clusters on several hosts are in host_scenarios.py.

A scenario's `inject` begins with the fault and ends when it is over and every process is back.
What it may cost: nothing, where redundancy exists (`redundant`); else an error that says why, or
a wait within the deadline. Never a wrong token, a hang, or a block left behind.
"""

from __future__ import annotations

import asyncio
from functools import partial

from chaos.clients import Outcome
from chaos.descriptors import no_descriptors
from chaos.hang import hang
from chaos.host_scenarios import HOSTS, RAY
from chaos.rank import strike_rank
from chaos.role_change import change_role
from chaos.slow import slow
from chaos.stage import Scenario, Stage, bound

LEAVE_AFTER_S = (0.0, 0.01, 0.03, 0.06, 0.1, 0.2, 0.4, 0.8)
LEAVE_AT_TOKENS = (1, 2, 8)
POLL_S = 0.1
ORDER_S = 1.0  # for counters to have what happened


async def _nothing(stage: Stage) -> None:
    await stage.hold()


async def _kill_role(stage: Stage, role: str) -> None:
    await stage.strike(*stage.named(role))


async def _part(stage: Stage, name: str, other: str) -> None:
    """All others hear both of them."""
    await stage.part(name, other)


async def _full_disk(stage: Stage) -> None:
    assert stage.disk is not None
    before = await _lines_lost(stage)
    await stage.do(stage.disk.fill)
    try:
        await stage.hold()
    finally:
        await stage.do(stage.disk.clear)
    await stage.whole()
    lost = await _lines_lost(stage) - before
    stage.notes.append(f"{lost:.0f} log lines found no room")
    if not lost:
        stage.void = "no process noticed the full disk"


async def _lines_lost(stage: Stage) -> float:
    counts: list[float] = [
        await stage.do(stage.cluster.metric, name, "baton_log_lines_lost_total")
        for name in stage.cluster.names()
    ]
    return sum(counts)


async def _no_blocks(stage: Stage) -> None:
    """More prompts at once than the pools have room for."""
    asking = asyncio.gather(*(stage.clients.ask(ask) for ask in stage.longs))
    waiting = 0
    while not asking.done():
        await asyncio.wait({asking}, timeout=POLL_S)
        audits = [await stage.do(stage.cluster.audit, name) for name in stage.cluster.workers()]
        waiting = max(waiting, sum(audit["waiting"] for audit in audits))
    stage.notes.append(f"up to {waiting} waited for blocks")
    if not waiting:
        stage.void = "there was room for all"


async def _leave(stage: Stage) -> None:
    """Clients that go away: while tokenized, queued, prefilled, fetched and decoded. Void unless
    some left before their first token, of which a handoff was called off, and some after it."""
    before = await _called_off(stage)
    await asyncio.gather(
        *(stage.leave(stage.longs[n], after) for n, after in enumerate(LEAVE_AFTER_S)),
        *(stage.leave_at(stage.longs[~n], token) for n, token in enumerate(LEAVE_AT_TOKENS)),
    )
    # Counters need this time to have what happened.
    await asyncio.sleep(ORDER_S)
    called_off = await _called_off(stage) - before
    left = [trace for trace in stage.clients.traces if trace.outcome is Outcome.LEFT]
    streaming = sum(bool(trace.tokens) for trace in left)
    waiting = len(left) - streaming
    stage.notes.append(
        f"{waiting} left before their first token ({called_off:.0f} handoffs called off), "
        f"{streaming} while tokens came"
    )
    stage.void = phases_not_left(waiting, called_off, streaming)


def phases_not_left(waiting: int, called_off: float, streaming: int) -> str | None:
    """Return the phases in which no client left, None where each was left. Counts of clients:
    without a token, of handoffs called off, with some tokens."""
    phases = {
        "before its first token": waiting,
        "while a handoff was under way": called_off,
        "while tokens came": streaming,
    }
    missing = [phase for phase, count in phases.items() if not count]
    return f"no client left {', nor '.join(missing)}" if missing else None


async def _called_off(stage: Stage) -> float:
    counts: list[float] = [
        await stage.do(partial(
            stage.cluster.metric, name, "baton_handoffs_total", outcome="cancelled"
        ))
        for name in stage.cluster.workers()
    ]  # fmt: skip
    return sum(counts)


async def _roll(stage: Stage) -> None:
    """Every process is stopped in order, one after the other, and restarted."""
    for name in stage.cluster.names():
        if code := await stage.do(stage.cluster.terminate, name):
            stage.broken.append(f"{name} ended with code {code}")
        await stage.back()


MEMORY = (
    Scenario("none", "no fault (for comparison)", _nothing),
    Scenario("kill-decode", "kill -9 of a decode worker", bound(Stage.strike, "decode-0")),
    Scenario("kill-prefill", "kill -9 of a prefill worker", bound(Stage.strike, "prefill-0")),
    Scenario("kill-router", "kill -9 of a router",
             bound(Stage.strike, "router"), may_cut=("router",)),
    Scenario(
        "kill-pair", "kill -9 of a decode and a prefill worker at once",
        bound(Stage.strike, "decode-1", "prefill-1"),
    ),
    Scenario("kill-all-prefill", "kill -9 of every prefill worker", bound(_kill_role, "prefill")),
    Scenario(
        "kill-all-decode", "kill -9 of every decode worker, started again at once",
        bound(_kill_role, "decode"), redundant=False, hold_s=0.0, settle_s=16.0,
    ),
    Scenario(
        "no-decode", "every decode worker gone for longer than the deadline",
        bound(_kill_role, "decode"), redundant=False, hold_s=8.0, deadline_s=4.0, settle_s=6.0,
    ),
    Scenario("pause-decode", "SIGSTOP of a decode worker", bound(Stage.pause, "decode-0")),
    Scenario("pause-prefill", "SIGSTOP of a prefill worker", bound(Stage.pause, "prefill-0")),
    Scenario("pause-router", "SIGSTOP of a router", bound(Stage.pause, "router")),
    Scenario("slow-decode", "a decode worker has a tenth of its time (SIGSTOP, SIGCONT in turn)",
             bound(slow, "decode-0"), hold_s=10.0),
    Scenario("hang-decode", "a decode worker's step never ends; the process lives",
             bound(hang, "decode-0"), needs="trace"),
    Scenario("hang-prefill", "a prefill worker's step never ends; the process lives",
             bound(hang, "prefill-0"), needs="trace"),
    Scenario(
        "full-disk", "the disk of logs and registry is full", _full_disk, hold_s=20.0,
        needs="disk",
    ),
    Scenario("fds-router", "no file descriptor left in a router", bound(no_descriptors, "router")),
    Scenario("fds-decode", "none left in a decode worker", bound(no_descriptors, "decode-0")),
    Scenario("fds-prefill", "none left in a prefill worker", bound(no_descriptors, "prefill-0")),
    Scenario("no-blocks", "more prompts than KV blocks", _no_blocks, deadline_s=60.0),
    Scenario("leave", "clients disconnect in every phase", _leave, quiet_s=1.0),
    Scenario("roll", "every process restarted in turn (SIGTERM)", _roll),
    Scenario("role", "a prefill worker made a decode worker and back (baton role)",
             bound(change_role, "prefill-0")),
)  # fmt: skip
TCP = (
    Scenario("tcp-none", "no fault (for comparison)", _nothing, "tcp"),
    Scenario("tcp-kill-decode", "kill -9 of a decode worker",
             bound(Stage.strike, "decode-0"), "tcp"),
    Scenario("tcp-kill-prefill", "kill -9 of a prefill worker",
             bound(Stage.strike, "prefill-0"), "tcp"),
    Scenario("tcp-pause-prefill", "SIGSTOP of a prefill worker",
             bound(Stage.pause, "prefill-0"), "tcp"),
    *(
        Scenario(
            f"tcp-cut-{role}-{way}", f"link of a {words} down, {ways}",
            bound(Stage.cut, name, way), "tcp", settle_s=3.5,
        )
        for role, name, words in (
            ("decode", "decode-0", "decode worker"),
            ("prefill", "prefill-0", "prefill worker"),
        )
        for way, ways in (
            ("in", "what it is sent is lost"),
            ("out", "what it sends is lost"),
            ("both", "both ways"),
        )
    ),
    Scenario("tcp-roll", "every process restarted in turn (SIGTERM)", _roll, "tcp"),
    Scenario("tcp-role", "a prefill worker made a decode worker and back (baton role)",
             bound(change_role, "prefill-0"), "tcp"),
    Scenario("tcp-cut-pair", "the way between a decode and a prefill worker down, both ways",
             bound(_part, "decode-0", "prefill-0"), "tcp", settle_s=3.5),
    Scenario("tcp-cut-router", "link of a router down, both ways",
             bound(Stage.cut, "router", "both"), "tcp"),
    Scenario("tcp-cut-router-in", "link of a router down, what it is sent is lost",
             bound(Stage.cut, "router", "in"), "tcp", settle_s=3.5),
    Scenario("tcp-cut-router-out", "link of a router down, what it sends is lost",
             bound(Stage.cut, "router", "out"), "tcp", settle_s=3.5),
    Scenario("tcp-leave", "clients disconnect in every phase", _leave, "tcp", quiet_s=1.0),
)  # fmt: skip
RANKS = (
    Scenario("rank-kill", "kill -9 of one rank of a decode worker",
             bound(strike_rank, "decode-0", "SIGKILL"), ranks=2),
    Scenario("rank-pause", "SIGSTOP of one rank of a decode worker",
             bound(strike_rank, "decode-0", "SIGSTOP"), ranks=2),
    Scenario("experts-kill", "kill -9 of one rank of a decode worker, which holds half the experts",
             bound(strike_rank, "decode-0", "SIGKILL"), ranks=2, ep=2),
)  # fmt: skip
ALL = (*MEMORY, *TCP, *RANKS, *HOSTS, *RAY)
SHORT = ("kill-decode", "pause-prefill", "kill-router", "leave")
