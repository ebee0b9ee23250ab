"""NIXL's Python bindings, scripted: what posting, polling and releasing a READ answers.

Stands in for `nixl_agent` of the bindings, so that the agent's thread meets every answer that
NIXL may give, at a known time. Moves no bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.runtime.errors import ReadFailed

_DEADLINE_S = 30.0


class NixlHandle:
    """A READ, or a prepared list of blocks."""

    def __init__(self, log: list[str], what: str) -> None:
        self.log = log
        self.what = what
        self.state = "PROC"
        self.stubborn = False

    def release(self) -> None:
        self.log.append(f"release {self.what}")
        if self.stubborn:
            raise RuntimeError("still active")


class ScriptedAgent:
    """Stands in for nixl_agent. `posted` are the READs in order; their states are set by the
    test; `first_state` is what posting answers."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.posted: list[NixlHandle] = []
        self.first_state: str | Exception = "PROC"
        self.fail: set[str] = set()
        self.polls = 0
        self.polled = threading.Event()
        self.descriptors: dict[Any, NDArray[np.uint64]] = {}
        self.memory: dict[Any, str] = {}  # of the descriptors of that name
        self.regions: list[tuple[int, int, int, str]] = []
        self.indices: list[tuple[list[int], list[int]]] = []
        self.threads: set[str] = set()

    def _call(self, name: str) -> None:
        self.threads.add(threading.current_thread().name)
        if name in self.fail:
            raise RuntimeError(f"{name} is scripted to fail")

    def create_backend(self, name: str, options: dict[str, str]) -> None:
        self._call("create_backend")

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> str:
        self._call("register_memory")
        self.regions += regions
        return "registered"

    def deregister_memory(self, registered: str) -> None:
        self.log.append("deregister")

    def get_agent_metadata(self) -> bytes:
        return b"metadata"

    def prep_xfer_dlist(self, name: str, rows: NDArray[np.uint64], kind: str) -> NixlHandle:
        self._call("prep_xfer_dlist" if name == "NIXL_INIT_AGENT" else "prep_peer")
        self.descriptors[name] = rows
        self.memory[name] = kind
        return NixlHandle(self.log, f"blocks of {name}")

    def add_remote_agent(self, metadata: bytes) -> str:
        self._call("add_remote_agent")
        return metadata.decode()

    def remove_remote_agent(self, name: str) -> None:
        self.log.append(f"remove {name}")
        self._call("remove_remote_agent")

    def make_prepped_xfer(
        self,
        kind: str,
        local: NixlHandle,
        own: Sequence[int],
        remote: NixlHandle,
        far: Sequence[int],
    ) -> NixlHandle:
        self._call("make_prepped_xfer")
        assert kind == "READ"  # I1: nothing is ever written into a peer
        self.indices.append((list(own), list(far)))
        self.posted.append(NixlHandle(self.log, f"read {len(self.posted)}"))
        return self.posted[-1]

    def transfer(self, handle: NixlHandle) -> str:
        if isinstance(self.first_state, Exception):
            raise self.first_state
        return self.first_state

    def check_xfer_state(self, handle: NixlHandle) -> str:
        if handle.state == "raise":
            raise ConnectionError("remote disconnected")
        return handle.state

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self.polls += 1
        self.polled.set()
        self._call("get_new_notifs")
        return {}

    def wait_polls(self, count: int) -> None:
        """Wait until the thread has gone round `count` times more."""
        for _ in range(count):
            self.polled.clear()
            assert self.polled.wait(_DEADLINE_S), "the thread stands still"


class Ended:
    """Where the end of a READ is reported, in another thread."""

    def __init__(self) -> None:
        self.reported: list[ReadFailed | None] = []
        self._event = threading.Event()

    def __call__(self, failure: ReadFailed | None) -> None:
        self.reported.append(failure)
        self._event.set()

    def wait(self) -> ReadFailed | None:
        assert self._event.wait(_DEADLINE_S), "no end was reported"
        (failure,) = self.reported
        return failure
