"""A call of the Kubernetes API from the controller's event loop, bounded in time.

Calls block, so each runs in a thread, whose end is not waited for longer than API_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from baton.deploy.host.kubernetes_api import JSON, KubernetesApi
from baton.runtime.errors import Unavailable

API_TIMEOUT_S = 3.0  # shorter than an order's, which the leadership outlasts


async def call_api(
    api: KubernetesApi,
    method: str,
    path: str,
    body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    content_type: str = JSON,
) -> dict[str, Any]:
    """Return the answer. Raises BatonError if the API refuses, Unavailable without an answer in
    time: the change may still be made, because the thread continues."""

    def call() -> dict[str, Any] | None:
        return api.call(method, path, body, (), content_type)

    try:
        async with asyncio.timeout(API_TIMEOUT_S):
            return await asyncio.to_thread(call) or {}
    except TimeoutError as error:
        raise Unavailable(
            f"the Kubernetes API has not answered within {API_TIMEOUT_S:g} s; a change that it was "
            "asked for may still be made"
        ) from error
