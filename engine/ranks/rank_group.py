"""The leader's control of its ranks: starts their processes, sends commands, detects their end.

    start ─▶ all load ─▶ give_pool ─▶ ready ─▶ send, send, ... ─▶ close

The leader is rank 0, in the process of the worker. A rank that ends or hangs ends the worker,
because its KV heads are lost, and with them every sequence.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.engine.ranks.rank_message import BELL, SLOTS, slot_of, write_arrays
from baton.engine.ranks.rank_options import RankOptions
from baton.engine.ranks.shared_memory import SharedMemory
from baton.runtime import errors
from baton.runtime.errors import BatonError, DeviceLost, ModelError

LOAD_S = 3600.0  # long enough for a slow disk
_CLOSE_S = 0.2  # a waiting rank ends at once; one that computes, or is stopped, is killed
_REPORT_S = 5.0  # for the exit code of a rank that closed its link
_POLL_S = 0.2
_MAX_MESSAGE_BYTES = 1 << 16

Found = TypeVar("Found")


class RankGroup:
    """Ranks 1 to `options.ranks` - 1. One thread at a time may call it."""

    module = "baton.engine.ranks.rank_process"  # what a rank runs

    def __init__(self, options: RankOptions, memories: Sequence[SharedMemory]) -> None:
        """Start the processes, which begin to load. `memories`: for sums, commands and logits."""
        self._options = options
        self._memories = list(memories)
        self._commands: NDArray[np.uint8] = memories[1].array()
        self._count = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._links: list[socket.socket] = []
        try:
            for rank in range(1, options.ranks):
                self._start(rank)
        except BaseException:  # an interrupted start leaves no rank behind
            self.close()
            raise

    def wait_loaded(self) -> None:
        """Wait until all ranks have loaded. Raises the error that a rank reports, or DeviceLost if
        a rank ends without a report."""
        self._answers(LOAD_S)

    def give_pool(self, memory: SharedMemory, options: RankOptions) -> None:
        """Send the memory of the pool, and wait until all ranks are ready. Raises like
        `wait_loaded`."""
        for rank, link in enumerate(self._links, start=1):
            text = replace(options, rank=rank).text().encode()
            socket.send_fds(link, [text], [memory.descriptor])
        self._answers(LOAD_S)

    def send(self, command: IntEnum, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Send `command` to all ranks, which carry out commands in order. Raises EngineError for
        arrays that do not fit, before anything is sent, and DeviceLost if a rank has ended."""
        slot = self._count % SLOTS
        size = write_arrays(slot_of(self._commands, slot), arrays)
        self._count += 1
        for link in self._links:
            try:
                link.send(BELL.pack(command, slot, size))
            except OSError as error:
                self.check()
                raise DeviceLost(f"a rank does not accept commands: {error}") from error

    def check(self) -> None:
        """Raise DeviceLost if a rank has ended."""
        for rank, process in enumerate(self._processes, start=1):
            if (code := process.poll()) is not None:
                raise DeviceLost(f"rank {rank} of {self._options.ranks} ended with code {code}")

    @property
    def process_ids(self) -> list[int]:
        """Return the process ids of ranks 1 and up."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """End all ranks: closing the link ends a waiting rank, a signal any other."""
        for link in self._links:
            link.close()
        deadline_s = time.monotonic() + _CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._links, self._processes = [], []

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._links.append(ours)
        with theirs:
            command = [sys.executable, "-P", "-m", self.module]
            process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        self._processes.append(process)
        text = replace(self._options, rank=rank).text().encode()
        socket.send_fds(ours, [text], [memory.descriptor for memory in self._memories])

    def _answers(self, within_s: float) -> list[dict[str, Any]]:
        """Receive one message of each rank, in the order of the ranks."""
        found: dict[int, dict[str, Any]] = {}
        deadline_s = time.monotonic() + within_s
        while len(found) < len(self._links):
            if time.monotonic() > deadline_s:
                raise DeviceLost(f"ranks did not answer within {within_s:g} s")
            waiting = [link for index, link in enumerate(self._links) if index not in found]
            for link in select.select(waiting, [], [], _POLL_S)[0]:
                found[self._links.index(link)] = self._answer(link)
        return [found[index] for index in sorted(found)]

    def _answer(self, link: socket.socket) -> dict[str, Any]:
        text = link.recv(_MAX_MESSAGE_BYTES)
        if not text:
            rank = 1 + self._links.index(link)
            code = self._processes[rank - 1].wait(_REPORT_S)
            raise DeviceLost(f"rank {rank} of {self._options.ranks} ended with code {code}")
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise _error_of(answer)
        return answer


def in_step(compute: Callable[[], Found]) -> Found:
    """Return what the leader computes between its ranks; an error there leaves them out of step,
    so it raises DeviceLost."""
    try:
        return compute()
    except DeviceLost:
        raise
    except Exception as error:
        # Whatever the leader's error is, the ranks are out of step.
        raise DeviceLost(
            f"the leader's part of a step failed between its ranks: {error}"
        ) from error


def _error_of(answer: dict[str, Any]) -> BatonError:
    kind = getattr(errors, str(answer["error"]), ModelError)
    known = isinstance(kind, type) and issubclass(kind, BatonError)
    error: BatonError = (kind if known else ModelError)(str(answer["detail"]))
    return error
