"""Clients of a release, in a network namespace of their own, which call a Service's address.

Requests start at an even pace, whatever becomes of them; each answer is compared with its right one
(chaos/clients.py). There is one Service, so that no client asks another router after a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType

from baton.deploy.cli.handoff_check import Samples, parsed, total
from chaos.answers import Answer
from chaos.asks import Ask
from chaos.clients import Clients, Outcome, Trace, offer
from tests.support.pods.pod import Pod, port_number

CLONE_NEWNET = 0x40000000
DEADLINE_S = 180.0  # a slow machine has a queue: its routers refuse what they cannot do in time
CONNECT_S = 10.0  # clients share a process with the pods' runner, which may keep them waiting
END_S = 240.0
SCRAPE_S = 10.0


class Load:
    """A context: requests start while it is entered, and its end waits for their answers.
    `traces` has every request that has started. `namespace` is one of `ip netns`."""

    def __init__(
        self,
        namespace: str,
        url: str,
        api_key: str,
        asks: Sequence[Ask],
        right: Mapping[int, Answer],
        per_s: float,
    ) -> None:
        self.traces: list[Trace] = []
        self._namespace, self._url, self._api_key = namespace, url, api_key
        self._asks, self._right, self._per_s = asks, right, per_s
        self._error: BaseException | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def __enter__(self) -> Load:
        self._thread.start()
        self._begun.wait(END_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._error is None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(END_S)
        if error is None and (self._error is not None or self._thread.is_alive()):
            raise RuntimeError("the load did not end by itself") from self._error

    def right(self) -> int:
        """Return how many requests had the right answer."""
        return sum(each.outcome is Outcome.RIGHT for each in self.traces)

    def failures(self) -> list[str]:
        """Return the outcome of each other request, and the reason."""
        return [
            f"{each.outcome} after {each.ended_s - each.started_s:.1f} s: {each.detail}"
            for each in self.traces
            if each.outcome is not Outcome.RIGHT
        ]

    def _run(self) -> None:
        try:
            _enter(self._namespace)
            asyncio.run(self._offer())
        except BaseException as error:  # __exit__ raises it in the test's thread
            self._error = error
        finally:
            self._begun.set()

    async def _offer(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        urls = {"service": self._url}
        async with Clients(
            urls, self._right, deadline_s=DEADLINE_S, api_key=self._api_key, connect_s=CONNECT_S
        ) as clients:
            self.traces = clients.traces
            self._begun.set()
            tasks = await offer(clients, self._asks, self._per_s, self._over)
            await asyncio.gather(*tasks)


def completed_handoffs(pod: Pod) -> int:
    """Return how many handoffs a decode worker's pod has read to their end."""
    return int(total(_scraped(pod, "admin"), "baton_handoffs_total", outcome="completed"))


def links(pod: Pod, role: str) -> int:
    """Return to how many workers of a role a router's pod is linked."""
    return int(total(_scraped(pod, "http"), "baton_links", peer=role))


def _scraped(pod: Pod, name: str) -> Samples:
    port = port_number(pod.spec["containers"][0], name)
    with urllib.request.urlopen(f"http://{pod.address}:{port}/metrics", timeout=SCRAPE_S) as page:
        return parsed(page.read().decode())


def _enter(namespace: str) -> None:
    """Move this thread into a network namespace (setns(2)). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        if libc.setns(handle, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), namespace)
    finally:
        os.close(handle)
