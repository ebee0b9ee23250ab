"""A thread that is held stands still, alone; one that is let go goes on where it was."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from chaos import held_thread
from chaos.hang import LOCKING
from chaos.held_thread import HeldThread, NotHeld, threads
from tests.support.waiting import wait_until

COUNTING = """
import hashlib, sys, threading, time
from pathlib import Path

counts = {"device": 0, "other": 0}

content = bytes(1 << 22)

def count(name):
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
    while True:
        time.sleep(0.001)
        if "computing" in sys.argv:
            hashlib.sha256(content)
        counts[name] += 1

for name in counts:
    threading.Thread(target=count, args=(name,), daemon=True).start()
for _ in sys.stdin:
    print(counts["device"], counts["other"], flush=True)
"""


class Counting:
    """A process with two threads that count."""

    def __init__(self, *manners: str) -> None:
        command = [sys.executable, "-c", COUNTING, *manners]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.counts()

    def counts(self) -> tuple[int, int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        device, other = self.process.stdout.readline().split()
        return int(device), int(other)

    def grown(self) -> tuple[bool, bool]:
        """Whether each has counted on, once the other has had a hundred turns."""
        before = self.counts()
        wait_until(lambda: self.counts()[1] >= before[1] + 100, 20)
        after = self.counts()
        return after[0] > before[0], after[1] > before[1]

    def device(self) -> int:
        (tid,) = threads(self.process.pid, "device")
        return tid


@pytest.fixture
def counting(request: pytest.FixtureRequest) -> Iterator[Counting]:
    if why := held_thread.unavailable():
        pytest.skip(why)
    made = Counting(*getattr(request, "param", ()))
    yield made
    made.process.kill()
    made.process.communicate(timeout=10)


def test_one_thread_stands_still_and_its_process_lives(counting: Counting) -> None:
    assert counting.grown() == (True, True)
    held = HeldThread(counting.device())
    assert counting.grown() == (False, True)
    assert counting.process.poll() is None
    held.release()
    assert counting.grown() == (True, True)
    HeldThread(counting.device()).release()  # as often as one likes
    assert counting.grown() == (True, True)


def owners(counting: Counting) -> set[str]:
    """Where its thread stands at fifty moments."""
    found = set()
    for _ in range(50):
        held = HeldThread(counting.device())
        found.add(held.code_file())
        held.release()
        time.sleep(0.001)  # the thread has to reach other code
    return found


def test_a_sleeping_thread_is_found_in_the_c_library(counting: Counting) -> None:
    assert any(LOCKING.match(owner) for owner in owners(counting))


@pytest.mark.parametrize("counting", [("computing",)], indirect=True)
def test_a_computing_thread_is_found_in_another_library(counting: Counting) -> None:
    assert not all(LOCKING.match(owner) for owner in owners(counting))


def test_a_held_thread_is_released_at_the_end(counting: Counting) -> None:
    holding = threading.Thread(target=HeldThread, args=(counting.device(),))
    holding.start()
    holding.join()
    assert counting.grown() == (True, True)


def test_a_process_may_die_while_a_thread_of_it_is_held(counting: Counting) -> None:
    held = HeldThread(counting.device())
    counting.process.kill()
    held.release()
    assert counting.process.wait(5) != 0


def test_a_thread_that_is_held_or_gone_is_not_held_again(counting: Counting) -> None:
    held = HeldThread(counting.device())
    with pytest.raises(NotHeld, match="permitted"):
        HeldThread(counting.device())
    held.release()
    with pytest.raises(NotHeld, match="No such process"):
        HeldThread(2**22 + 1)  # more than there can be


def test_names_of_threads_are_exact(counting: Counting) -> None:
    assert threads(counting.process.pid, "dev") == []
    assert threads(counting.process.pid, "other") != threads(counting.process.pid, "device")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_thread, "SEIZE", 0x7FFF)  # no request of the kernel's
    assert "No such process" in held_thread.unavailable()
    monkeypatch.setattr("sys.platform", "darwin")
    assert held_thread.unavailable() == "needs Linux"
