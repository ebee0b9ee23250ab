"""The number of workers of a StatefulSet, through the scale subresource of the Kubernetes API.

    GET .../statefulsets/NAME/scale ─▶ number, version ─▶ PATCH of that version, else 409

A StatefulSet removes the pod with the highest ordinal first, and a worker has its pod's name.
Nothing else of the object is read or written: the account needs `get` and `patch` of one scale.
Calls block, so each runs in a thread, whose end is not waited for longer than API_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

from baton.deploy.control.worker_count import WorkerCount
from baton.deploy.host.kubernetes_api import MERGE_PATCH, KubernetesApi
from baton.runtime.errors import BatonError, ConfigError, Unavailable

API_TIMEOUT_S = 3.0  # shorter than an order's, which the leadership outlasts
TARGET_KIND = "statefulset"
FLEET = "fleet"  # the target that is the number of `baton fleet --follow`

T = TypeVar("T")


class StatefulSetScale:
    """`name` in `namespace`. Raises BatonError if the API refuses, Unavailable without an answer in
    time: then a PATCH may have had its effect, which the next `count` shows."""

    def __init__(self, api: KubernetesApi, namespace: str, name: str) -> None:
        self._api = api
        self._name = name
        space = quote(namespace, safe="")
        self._path = f"/apis/apps/v1/namespaces/{space}/statefulsets/{quote(name, safe='')}/scale"

    async def count(self) -> WorkerCount:
        return self._count_of(await self._call("GET", self._path, None))

    async def check(self, seen: WorkerCount, workers: int) -> None:
        """Ask whether `resize` would be accepted now. Changes nothing."""
        await self._call("PATCH", f"{self._path}?dryRun=All", _patch(seen, workers))

    async def resize(self, seen: WorkerCount, workers: int) -> None:
        """Ask for another number, if the object is still as it was seen."""
        await self._call("PATCH", self._path, _patch(seen, workers))

    async def close(self) -> None:
        """There is nothing to end: no connection outlives its call."""

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        def call() -> dict[str, Any] | None:
            return self._api.call(method, path, body, (), MERGE_PATCH)

        answer = await _within(API_TIMEOUT_S, call)
        return answer or {}

    def _count_of(self, answer: Mapping[str, Any]) -> WorkerCount:
        try:
            asked = int(answer["spec"].get("replicas", 0))  # the API leaves a 0 out
            version = str(answer["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BatonError(f"the Kubernetes API answered with no Scale ({error!r})") from error
        return WorkerCount(asked, version, f"{self._name}-{asked - 1}")


async def _within(seconds: float, work: Callable[[], T]) -> T:
    """Run blocking work in a thread. Raises Unavailable if it takes longer; the thread goes on."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.to_thread(work)
    except TimeoutError as error:
        raise Unavailable(
            f"the Kubernetes API has not answered within {seconds:g} s; a change that it was "
            "asked for may still be made"
        ) from error


def _patch(seen: WorkerCount, workers: int) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": seen.version}, "spec": {"replicas": workers}}


def target_name(target: str) -> str:
    """Return the name in `statefulset/NAME`; empty for FLEET. Raises ConfigError."""
    if target == FLEET:
        return ""
    kind, separator, name = target.partition("/")
    if kind != TARGET_KIND or not separator or not name:
        raise ConfigError(
            f"--resize is {target[:80]!r}: write it as {TARGET_KIND}/NAME, or as {FLEET} for "
            "workers of `baton fleet --follow`"
        )
    return name


def bounds_of(text: str) -> tuple[int, int]:
    """Return the least and the most in `LEAST-MOST`. Raises ConfigError."""
    least, separator, most = text.partition("-")
    if not separator or not least.isdecimal() or not most.isdecimal():
        raise ConfigError(f"--workers is {text[:80]!r}: write it as LEAST-MOST, such as 2-8")
    if not 2 <= int(least) <= int(most):
        raise ConfigError(
            f"--workers is {text}: the least is 2, one worker for each role, and no more than "
            "the most"
        )
    return int(least), int(most)
