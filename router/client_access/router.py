"""The parts of a running router, as both front ends use them: readiness, tenants, arrival.

Knows no transport. Made once by `server.py`.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from baton.router.answers.request_handler import RequestServices
from baton.router.fleet.fleet import INDEX_NOT_REBUILT, Fleet
from baton.router.requests.body_budget import BodyBudget, HeldBody
from baton.router.requests.deadline import until
from baton.router.requests.validated_request import ValidatedRequest
from baton.router.requests.validator import Validator
from baton.router.text.encode_queue import on_behalf_of
from baton.router.text.tokenizer import Tokenizer
from baton.runtime import metrics
from baton.runtime.config import RouterConfig
from baton.runtime.errors import Unavailable
from baton.runtime.identity import tenant_salt


@dataclass(slots=True)
class Router:
    """`stopping` turns readiness off before the end; `key` is the cluster's identity key."""

    config: RouterConfig
    model: str
    started_s: int  # Unix time
    fleet: Fleet
    validator: Validator
    tokenizer: Tokenizer
    serving: RequestServices
    bodies: BodyBudget
    key: bytes
    tokenizer_info: Mapping[str, object] = field(default_factory=dict)
    stopping: bool = False

    def check_ready(self) -> dict[str, int]:
        """Return the number of linked workers of each role. Raises Unavailable if no request
        could be served."""
        if self.stopping:
            raise Unavailable("the router stops")
        workers = self.fleet.linked_counts()
        if not workers["decode"]:
            raise Unavailable("no decode worker is there yet")
        if not self.fleet.rebuilt():
            raise Unavailable(INDEX_NOT_REBUILT)
        return workers

    def publish_gauges(self) -> None:
        """Set the gauges that come from the router's state, when its metrics are scraped."""
        self.fleet.publish_gauges()
        metrics.WAITING_REQUESTS.set(self.serving.dispatcher.waiting)

    def of_tenant(self, request: ValidatedRequest, tenant: bytes) -> ValidatedRequest:
        """Return the request with its tenant's salt in place of its own."""
        isolated = b"" if self.config.shared_prefixes else tenant
        return replace(request, cache_salt=tenant_salt(self.key, isolated, request.cache_salt))

    @asynccontextmanager
    async def receiving(
        self, deadline_s: float, tenant: bytes, *, generates: bool = False
    ) -> AsyncIterator[HeldBody]:
        """Bound the reading of a request's body and prompt. Raises Overloaded, before it is read,
        if a request that generates would miss its deadline. Yields the account for the body's
        bytes."""
        with self.serving.admission.arrival(), self.bodies.account(tenant) as body:
            self.serving.dispatcher.check_deadline(deadline_s if generates else math.inf)
            with on_behalf_of(tenant):
                async with until(deadline_s):
                    yield body
