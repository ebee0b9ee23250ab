"""One thread of a process stands still while the process lives on: ptrace, as a debugger has it.

    threads(pid, "device") ─▶ HeldThread(tid) ─▶ the kernel runs it no more ─▶ release

Linux alone, and with the right to trace. The kernel ties what is held to the thread that holds it:
the maker of a `HeldThread` releases it, and if it ends first the kernel lets go by itself, so that
nothing stays held. Knows not what the thread does; it may have a lock that others want. The C
library's heap has some, Python another: `code_file` says in whose code it stands.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17  # of linux/ptrace.h
ANY_CHILD = 0x40000000  # __WALL: threads too
STOP_S = 2.0
POLL_S = 0.001


class NotHeld(RuntimeError):
    """The kernel refused, or the thread did not stop in time; the message says which."""


def unavailable() -> str | None:
    """Return why no thread can be held here, None where one can."""
    if sys.platform != "linux":
        return "needs Linux"
    sleeping = subprocess.Popen(["sleep", "10"])
    try:
        HeldThread(sleeping.pid).release()
    except NotHeld as error:
        return str(error)
    finally:
        sleeping.kill()
        sleeping.wait(10)
    return None


def threads(pid: int, name: str) -> list[int]:
    """The ids of a process's threads that the kernel knows by this name."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name]


class HeldThread:
    """Held from the first moment on. Raises NotHeld if it cannot be."""

    def __init__(self, tid: int) -> None:
        self._tid = tid
        self._trace = _ptrace()
        self._do(SEIZE)
        try:
            self._do(INTERRUPT)
            self._wait()
        except NotHeld:
            self._trace(DETACH, self._tid, None, None)
            raise

    def release(self) -> None:
        """Let it go on where it stood. If its process was killed, wait for its end: else no other
        process could wait for that of the process."""
        if self._trace(DETACH, self._tid, None, None) == -1:
            self._wait()

    def code_file(self) -> str:
        """The name of the file in whose code it stands; empty in code that was made at run time.
        Raises OSError if its process has ended."""
        folder = Path(f"/proc/{self._tid}")
        counter = int((folder / "syscall").read_text().split()[-1], 16)
        for line in (folder / "maps").read_text().splitlines():
            bounds, *_, path = line.split(maxsplit=5) if line.count("/") else (line.split()[0], "")
            start, end = (int(bound, 16) for bound in bounds.split("-"))
            if start <= counter < end:
                return Path(path).name
        return ""

    def _wait(self) -> None:
        """Wait for the thread's stop, or its end."""
        until = time.monotonic() + STOP_S
        while not self._stopped():
            if time.monotonic() > until:
                raise NotHeld(f"thread {self._tid} did not stop within {STOP_S:g} s")
            time.sleep(POLL_S)  # the kernel reports a traced stop to waitpid alone

    def _stopped(self) -> bool:
        try:
            return os.waitpid(self._tid, ANY_CHILD | os.WNOHANG)[0] == self._tid
        except ChildProcessError as error:
            raise NotHeld(f"thread {self._tid} has ended") from error

    def _do(self, request: int) -> None:
        if self._trace(request, self._tid, None, None) == -1:
            raise NotHeld(f"thread {self._tid}: {os.strerror(ctypes.get_errno())}")


def _ptrace() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).ptrace
    function.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_long
    return function
