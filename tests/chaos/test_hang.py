"""The scenario of a hung worker against a small process that hangs as one: what it measures, and
what it finds broken."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from chaos import hang as scenario
from chaos import held_thread
from chaos.hang import hang
from chaos.held_thread import HeldThread
from chaos.stage import Stage

# Its device thread counts steps: by computing sums in C (without Python's lock), and by computing
# in Python (with it), if it is told to.
# /readyz is red once they stand still for 0.2 s, and a router counts a hang 0.2 s later. To who
# asks whether a step runs it says now and then that none does, if it is told to.
WORKER = """
import hashlib, http.server, json, sys, threading, time
from pathlib import Path

red, busy, dead = "red" in sys.argv, "idle" not in sys.argv, "dead" in sys.argv
runs = [True, True, False, True, False] if "between" in sys.argv else []
steps, last_s, hangs = 0, time.monotonic(), 0

def device():
    global steps, last_s
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("device")
    content = bytes(1 << 23)
    while True:
        hashlib.sha256(content)
        until_s = time.monotonic() + (0.005 if "computing" in sys.argv else 0)
        while time.monotonic() < until_s:
            pass
        steps, last_s = steps + 1, time.monotonic()

class Admin(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global hangs
        still_s = time.monotonic() - last_s
        hangs = max(hangs, still_s > 0.4)
        step = runs.pop(0) if runs and self.path == "/audit" else busy
        shown = {"running": busy, "step_s": still_s if step else None, "hangs": int(hangs),
                 "admitted": steps}
        ill = (self.path == "/readyz" and red and still_s > 0.2) or (
            self.path == "/healthz" and dead and still_s > 0.2)
        body = json.dumps(shown).encode()
        self.send_response(503 if ill else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin)
threading.Thread(target=device, daemon=True).start()
print(server.server_port, flush=True)
server.serve_forever()
"""


class OneWorker:
    """A cluster of that process alone, and of a router that sees what it tells."""

    def __init__(self, *manners: str) -> None:
        command = [sys.executable, "-c", WORKER, *manners]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = f"127.0.0.1:{int(self.process.stdout.readline())}"
        self.waited_for: list[int] = []
        self.step_s = 0.25

    def names(self) -> list[str]:
        return ["decode-0", "router"]

    def workers(self) -> list[str]:
        return ["decode-0"]

    def pid(self, _: str) -> int:
        return self.process.pid

    def records(self) -> dict[str, SimpleNamespace]:
        return {"decode-0": SimpleNamespace(admin_address=self.address)}

    def wait_ready(self, workers: int) -> None:
        self.waited_for.append(workers)

    def metric(self, name: str, metric: str, **labels: str) -> float:
        reported = httpx.get(f"http://{self.address}/metrics", timeout=5).json()
        if name == "router":
            assert (metric, labels) == ("baton_hangs_total", {"role": "decode"})
            return float(reported["hangs"])
        if metric == "baton_step_seconds_bucket":
            assert list(labels) == ["le", "role"]  # as metrics show them
            return 1000.0 if float(labels["le"]) >= self.step_s else 980.0
        return 1000.0 if metric == "baton_step_seconds_count" else reported["admitted"]


class Asking:
    """Clients that remember what they ask; an answer takes a while."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answered = 0
        self.last_s = 0.0

    async def ask(self, ask: str) -> None:
        self.last_s = asyncio.get_running_loop().time()
        self.asked.append(ask)
        await asyncio.sleep(0.05)  # An answer takes this long.
        self.answered += 1


@pytest.fixture
def stage_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    if why := held_thread.unavailable():
        pytest.skip(why)
    monkeypatch.setattr(scenario, "WORK_S", 0.3)
    monkeypatch.setattr(scenario, "LIVES_S", 0.3)
    monkeypatch.setattr(scenario, "BREATH_S", 0.1)
    made: list[OneWorker] = []

    def make(*manners: str) -> Stage:
        made.append(OneWorker(*manners))
        return Stage(
            cluster=made[-1],
            clients=Asking(),
            asks=(),
            longs=("a", "b", "c"),
            hold_s=1.0,
        )

    yield make
    for worker in made:
        worker.process.kill()
        worker.process.communicate(timeout=10)


@pytest.mark.parametrize("manners", [("red",), ("red", "computing")])
async def test_a_timely_report_is_printed_and_kept(
    stage_of: Callable[..., Stage], manners: tuple[str, ...]
) -> None:
    """Held while it computes it would hold Python's lock: then it is tried again."""
    stage = stage_of(*manners)
    await hang(stage, "decode-0")
    assert (stage.broken, stage.void) == ([], None)
    assert stage.cluster.waited_for == [1]
    held, note = stage.notes
    assert held.startswith("held in a step (let go ") and "0 times between steps" in held
    figures = [float(figure) for figure in re.findall(r"(\d+\.\d+) s", note)]
    ran_s, red_s, left_s, green_s, used_s = figures
    assert (
        1.0 <= ran_s < 2.0
        and 0.1 < red_s < 1.0
        and 0.3 < left_s < 1.0
        and green_s < 1.0
        and used_s < 1.0
    )
    assert "its steps took at most 250 ms" in note


async def test_long_prompts_are_asked_until_it_is_held_and_answered(
    stage_of: Callable[..., Stage],
) -> None:
    stage = stage_of("red")
    await hang(stage, "decode-0")
    clients: Any = stage.clients
    assert clients.asked[:4] == ["a", "b", "c", "a"][: len(clients.asked)]
    assert 2 <= len(clients.asked) == clients.answered
    assert asyncio.get_running_loop().time() - clients.last_s >= 1.0  # for which it is held


async def test_between_two_steps_it_is_let_go_and_held_again(
    stage_of: Callable[..., Stage],
) -> None:
    stage = stage_of("red", "between")
    await hang(stage, "decode-0")
    assert (stage.broken, stage.void) == ([], None)
    reported = re.search(
        r"let go (\d+) times with a lock, (\d+) times between steps", stage.notes[0]
    )
    assert reported is not None
    with_lock, between = map(int, reported.groups())  # who answers late counts as one with a lock
    assert between >= 1 and with_lock + between >= 2


async def test_a_step_that_ends_while_it_is_held_breaks_the_scenario(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of("red")
    monkeypatch.setattr(HeldThread, "__init__", lambda *_: None)
    monkeypatch.setattr(HeldThread, "release", lambda _: None)
    monkeypatch.setattr(HeldThread, "code_file", lambda _: "")
    await hang(stage, "decode-0")
    assert "the step of decode-0 ended while it was held" in stage.broken


async def test_a_worker_that_stays_ready_breaks_its_promise(
    stage_of: Callable[..., Stage],
) -> None:
    stage = stage_of()
    await hang(stage, "decode-0")
    assert stage.broken == ["/readyz of decode-0 was red after inf s"]


async def test_a_worker_that_says_it_is_dead_breaks_its_promise(
    stage_of: Callable[..., Stage],
) -> None:
    stage = stage_of("red", "dead")
    await hang(stage, "decode-0")
    (reported,) = stage.broken
    assert reported.startswith("/healthz of decode-0 was not 200")


async def test_a_worker_without_work_makes_it_void(stage_of: Callable[..., Stage]) -> None:
    stage = stage_of("red", "idle")
    await hang(stage, "decode-0")
    assert "never found at work" in stage.void and not stage.broken


@pytest.mark.parametrize(("step_s", "kept"), [(0.25, False), (0.5, True)])
async def test_longer_steps_take_longer_to_be_found_overdue(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, step_s: float, kept: bool
) -> None:
    monkeypatch.setattr(scenario, "LEFT_S", 0.0)
    monkeypatch.setattr(scenario, "ORDER_S", -0.9)  # so that 0.1 s are left, and 1.1 s
    stage = stage_of("red")
    stage.cluster.step_s = step_s
    await hang(stage, "decode-0")
    assert (stage.broken == []) is kept
    assert kept or stage.broken[0].startswith("a router left decode-0 after")


async def test_where_no_bound_is_known_nothing_is_shown(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker that no request ever left would have been left in time."""
    monkeypatch.setattr(scenario, "_left", never)
    stage = stage_of("red")
    stage.cluster.step_s = math.inf  # of OneWorker
    await hang(stage, "decode-0")
    assert stage.void == "steps of decode-0 take longer than 1 s: no bound holds for them"
    stage.void, stage.cluster.step_s = None, 0.25  # of OneWorker
    await hang(stage, "decode-0")
    assert stage.broken == ["a router left decode-0 after inf s"] and not stage.void


async def never(*_: object) -> bool:
    return False


async def test_one_that_is_not_used_again_breaks_it(
    stage_of: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = stage_of("red")
    monkeypatch.setattr(scenario, "USED_S", 0.3)
    monkeypatch.setattr(OneWorker, "metric", lambda *_, **labels: 7.0 if labels else 1.0)
    await hang(stage, "decode-0")
    assert "decode-0 was not used again within 0.3 s" in stage.broken
    assert any("a router left decode-0 after inf s" in reported for reported in stage.broken)
