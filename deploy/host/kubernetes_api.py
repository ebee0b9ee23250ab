"""Calls of the Kubernetes API of this cluster, from inside a pod.

Standard library alone. The account's token, its namespace and the API server's authority are files
that Kubernetes mounts into a pod. It replaces the token before it expires, so each call reads it.
Blocking: an event loop calls it in a thread. Holds no connection between two calls.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from baton.runtime.errors import BatonError, ConfigError, Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20  # of an answer; a Secret has at most 1 MiB
JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"  # RFC 7386
JSON_PATCH = "application/json-patch+json"  # RFC 6902


class KubernetesApi:
    """`host` and `port` of the API server; `timeout_s` bounds the connection and each wait for
    bytes. Raises ConfigError where the account's files are missing: the pod has no service
    account."""

    def __init__(
        self, host: str, port: int, account: Path = ACCOUNT, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._account = account
        try:
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
            self._token()
        except OSError as error:
            raise ConfigError(
                f"{account} does not hold a service account ({error}): run this in a pod whose "
                "automountServiceAccountToken is true"
            ) from error
        self._host, self._port, self._timeout_s = host, port, timeout_s

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        none_for: Collection[int] = (),
        content_type: str = JSON,
        may_send: Callable[[], bool] = lambda: True,
    ) -> dict[str, Any] | None:
        """Return the answer, or None for one of the statuses in `none_for`. `may_send` is asked
        once the connection stands: if the caller does not want the request any more, it is not
        sent. Raises Unavailable without an answer: the call may have had its effect; BatonError if
        the API refuses."""
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=self._timeout_s, context=self._context
        )
        with closing(connection):
            try:
                connection.connect()
                if not may_send():
                    raise TimeoutError("connected too late, nothing was sent")
                headers = {"Authorization": f"Bearer {self._token()}", "Content-Type": content_type}
                connection.request(method, path, json.dumps(body) if body else None, headers)
                response = connection.getresponse()
                text = response.read(MAX_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(
                    f"the Kubernetes API at {self._host}:{self._port} does not answer ({error})"
                ) from error
        if response.status in none_for:
            return None
        try:
            answer: dict[str, Any] = json.loads(text)
        except ValueError:
            answer = {}
        if response.status not in (200, 201):
            raise BatonError(
                f"the Kubernetes API refused {method} {path} with {response.status}: "
                f"{str(answer.get('message', ''))[:300]}"
            )
        return answer

    def _token(self) -> str:
        return (self._account / "token").read_text().strip()


def api_server(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the API server, which Kubernetes sets in each container. Raises
    ConfigError outside a pod."""
    host, port = (
        environ.get("KUBERNETES_SERVICE_HOST", ""),
        environ.get("KUBERNETES_SERVICE_PORT", ""),
    )
    if not host or not port.isdecimal():
        raise ConfigError(
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set: run this in a pod"
        )
    return host, int(port)


def own_namespace(account: Path = ACCOUNT) -> str:
    """Return the namespace of this pod. Raises ConfigError outside a pod with an account."""
    try:
        return (account / "namespace").read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"{account / 'namespace'} cannot be read ({error.strerror}): run this in a pod whose "
            "automountServiceAccountToken is true"
        ) from error
