"""The number of workers of a StatefulSet, through the scale subresource of the Kubernetes API.

    GET .../statefulsets/NAME/scale ─▶ number, version ─▶ PATCH of that version, else 409

A StatefulSet removes the pod with the highest ordinal first, and a worker has its pod's name.
Nothing else of the object is read or written: the account needs `get` and `patch` of one scale, and
`get` of its pods, by name, to say why one does not get ready.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from baton.deploy.control.kubernetes_calls import call_api
from baton.deploy.control.pod_problems import pod_problem
from baton.deploy.host.kubernetes_api import MERGE_PATCH, KubernetesApi
from baton.planner.control.repeated_event import RepeatedEvent
from baton.planner.control.worker_count import WorkerCount
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime import logs
from baton.runtime.errors import BatonError

MAX_ASKED = 16  # pods at a time

log = logs.get(__name__)


class StatefulSetScale:
    """`name` in `namespace`. Raises BatonError if the API refuses, Unavailable without an answer in
    time: then a PATCH may have had its effect, which the next `count` shows."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str) -> None:
        self._api = api
        self._name = name
        space = quote(namespace, safe="")
        self._path = f"/apis/apps/v1/namespaces/{space}/statefulsets/{quote(name, safe='')}/scale"
        self._pods_path = f"/api/v1/namespaces/{space}/pods"
        self._problems: dict[str, WorkerProblem] = {}  # as read last, by worker id
        self._turn = 0  # of the pods that are asked for next
        self._unread = RepeatedEvent()

    async def count(self) -> WorkerCount:
        return self._count_of(await call_api(self._api, "GET", self._path))

    async def check(self, seen: WorkerCount, workers: int) -> None:
        """Ask whether `resize` would be accepted now. Changes nothing."""
        await self._patch(f"{self._path}?dryRun=All", seen, workers)

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        """Ask for another number, if the object is still as it was seen."""
        await self._patch(self._path, seen, workers)

    async def problems(self, missing: Collection[str]) -> dict[str, WorkerProblem]:
        """Return what the pods of these workers said last. Each call asks the API for the next
        MAX_ASKED of them. Raises BatonError if the API answers for none of these."""
        asked = self._next_asked(list(missing))
        answers = await asyncio.gather(*map(self._problem, asked), return_exceptions=True)
        failures: dict[str, BatonError] = {}
        for name, answer in zip(asked, answers, strict=True):
            if isinstance(answer, BatonError):
                failures[name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is None:
                self._problems.pop(name, None)
            else:
                self._problems[name] = answer
        if failures:
            first = next(iter(failures.values()))
            if len(failures) == len(asked):
                raise first
            if self._unread.should_log((tuple(failures), str(first)), time.monotonic()):
                log.warning("pods not read", pods=list(failures), reason=str(first))
        self._problems = {name: self._problems[name] for name in missing if name in self._problems}
        return dict(self._problems)

    async def close(self) -> None:
        """There is nothing to end: no connection outlives its call."""

    def _next_asked(self, names: list[str]) -> list[str]:
        first = self._turn % max(1, len(names))
        asked = [*names[first:], *names[:first]][:MAX_ASKED]
        self._turn = first + len(asked)
        return asked

    async def _problem(self, name: str) -> WorkerProblem | None:
        path = f"{self._pods_path}/{quote(name, safe='')}"
        pod = await call_api(self._api, "GET", path, may_be_missing=True)
        return pod_problem(pod) if pod else WorkerProblem("no_pod", f"there is no pod {name}")

    async def _patch(self, path: str, seen: WorkerCount, workers: int) -> None:
        body = {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": workers}}
        await call_api(self._api, "PATCH", path, body, MERGE_PATCH)

    def _count_of(self, answer: Mapping[str, Any]) -> WorkerCount:
        try:
            asked = int(answer["spec"].get("replicas", 0))  # the API leaves a 0 out
            version = str(answer["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BatonError(f"the Kubernetes API answered with no Scale ({error!r})") from error
        return WorkerCount(version, tuple(f"{self._name}-{number}" for number in range(asked)))
