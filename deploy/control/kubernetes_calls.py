"""A call of the Kubernetes API from the controller's event loop, bounded in time.

Calls block, so each runs in a thread, whose end is not waited for longer than API_TIMEOUT_S. A
request that has not left within that time never does, nor one whose caller was cancelled before:
the caller may not lead any more.
"""

from __future__ import annotations

import asyncio
import threading
import time
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
    *,
    may_be_missing: bool = False,
) -> dict[str, Any]:
    """Return the answer; an empty one if there is no such object and it `may_be_missing`. Raises
    BatonError if the API refuses, Unavailable without an answer in time: the change may still be
    made, because the thread continues."""
    send_by_s = time.monotonic() + API_TIMEOUT_S
    given_up = threading.Event()
    none_for = (404,) if may_be_missing else ()

    def may_send() -> bool:
        return not given_up.is_set() and time.monotonic() <= send_by_s

    def call() -> dict[str, Any] | None:
        return api.call(method, path, body, none_for, content_type, may_send)

    try:
        async with asyncio.timeout(API_TIMEOUT_S):
            return await asyncio.to_thread(call) or {}
    except TimeoutError as error:
        raise Unavailable(
            f"the Kubernetes API has not answered within {API_TIMEOUT_S:g} s; a change that it was "
            "asked for may still be made"
        ) from error
    finally:
        given_up.set()
