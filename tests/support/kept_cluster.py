"""A fleet of real processes that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from chaos.cluster import Cluster


class KeptCluster:
    """One prefill and two decode workers that the tests of a module share: whole and at rest when
    each begins. A fleet that is not at rest after a test fails it, and the next one gets another.
    """

    WORKERS = ("prefill-0", "decode-0", "decode-1")

    def __init__(self, make: Callable[[], Cluster]) -> None:
        self._make = make
        self._cluster: Cluster | None = None

    def whole(self) -> Cluster:
        if self._cluster is None:
            self._cluster = self._make()
            self._cluster.start(1, 2)
        for name in self.WORKERS:
            if not self._cluster.alive(name):
                self._cluster.start_worker(name.split("-")[0], name)
        self._cluster.wait_ready(len(self.WORKERS))
        return self._cluster

    def at_rest(self) -> None:
        assert self._cluster is not None
        try:
            self._cluster.quiet(within_s=5.0)
        except (AssertionError, httpx.HTTPError):
            self.close()
            raise

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            print(self._cluster.logs())
        self._cluster = None
