"""A router's admin port, as a process of deploy/ reads its traces and posts advice to it.

HTTP with the operator's key, which goes in a header; by TLS where the URL begins with https://.
Blocking: call it in a thread. Holds no connection between two calls.
"""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from baton.deploy.host.router_trust import connect, fault_of
from baton.runtime.errors import ConfigError, Unavailable

TIMEOUT_S = 10.0
MAX_TRACES = 1000  # that the router lists at once
MAX_ANSWER_BYTES = 64 << 20
ADVICE_PATH = "/console/advice"


@dataclass(frozen=True, slots=True)
class RouterAdmin:
    """`url` is http://HOST:PORT or https://HOST:PORT of the admin port, `key` the operator's."""

    url: str
    key: str

    def traces(self) -> list[dict[str, Any]]:
        """Return the records of the requests that ended last, the newest first. Raises Unavailable
        without an answer, ConfigError for a refusal."""
        body = self._call("GET", f"/traces?latest={MAX_TRACES}", None)
        found = json.loads(body)["traces"]
        return [dict(each) for each in found]

    def post_advice(self, advice: dict[str, Any]) -> None:
        """Give the console its recommendations. Raises as `traces`."""
        self._call("POST", ADVICE_PATH, json.dumps(advice).encode())

    def _call(self, method: str, path: str, body: bytes | None) -> bytes:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{self.url} is no admin port: write it as http://127.0.0.1:9402")
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        with closing(connect(self.url, TIMEOUT_S)) as connection:
            try:
                connection.request(method, path, body, headers)
                answer = connection.getresponse()
                found = answer.read(MAX_ANSWER_BYTES)
            except (OSError, http.client.HTTPException) as error:
                if (fault := fault_of(self.url, error)) is not None:
                    raise ConfigError(fault) from error
                raise Unavailable(f"the admin port {self.url} does not answer: {error}") from error
        if answer.status == 401:
            raise ConfigError(
                f"the admin port {self.url} refuses the key: set BATON_ADMIN_KEY to the operator's"
            )
        if answer.status not in (200, 204):
            text = found[:300].decode(errors="replace")
            raise ConfigError(f"the admin port {self.url} answered {answer.status}: {text}")
        return found
