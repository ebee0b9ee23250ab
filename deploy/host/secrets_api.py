"""Secrets of one namespace, through the Kubernetes API, from inside a pod.

Standard library alone. The account's token and the API server's authority are the files that
Kubernetes mounts into a pod. Holds no state between calls.
"""

from __future__ import annotations

import http.client
import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from baton.runtime.errors import BatonError, ConfigError, Unavailable

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 30.0
MAX_BYTES = 4 << 20  # of an answer; a Secret has at most 1 MiB


@dataclass(frozen=True, slots=True)
class Secret:
    """A Secret's name, type and decoded data. `version` is empty until the API has stored it."""

    name: str
    data: Mapping[str, bytes]
    kind: str = "Opaque"
    version: str = ""


class SecretsApi:
    """`host` and `port` of the API server. Raises ConfigError where the account's files are
    missing: the pod has no service account."""

    def __init__(self, namespace: str, host: str, port: int, account: Path = ACCOUNT) -> None:
        try:
            self._token = (account / "token").read_text().strip()
            self._context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ConfigError(
                f"{account} does not hold a service account ({error}): run this in a pod whose "
                "automountServiceAccountToken is true"
            ) from error
        self._host, self._port = host, port
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets"

    def read(self, name: str) -> Secret | None:
        """Return the Secret, or None if there is none. Raises BatonError if the API refuses."""
        answer = self._call("GET", f"{self._path}/{quote(name, safe='')}", None, {404})
        if answer is None:
            return None
        found = {key: b64decode(value) for key, value in (answer.get("data") or {}).items()}
        version = answer["metadata"]["resourceVersion"]
        return Secret(name, found, answer.get("type", "Opaque"), version)

    def create(self, secret: Secret) -> bool:
        """Store a new Secret. Return False if there is one of this name already."""
        return self._call("POST", self._path, self._body(secret), {409}) is not None

    def replace(self, secret: Secret) -> bool:
        """Store new data in place of the version that was read. Return False if it has changed."""
        path = f"{self._path}/{quote(secret.name, safe='')}"
        return self._call("PUT", path, self._body(secret), {409}) is not None

    def _body(self, secret: Secret) -> dict[str, Any]:
        metadata = {"name": secret.name, "namespace": self._namespace}
        if secret.version:
            metadata["resourceVersion"] = secret.version
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": secret.kind,
            "data": {key: b64encode(value).decode() for key, value in secret.data.items()},
        }

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None, none_for: set[int]
    ) -> dict[str, Any] | None:
        """Return the answer, or None for one of the statuses in `none_for`."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        connection = http.client.HTTPSConnection(
            self._host, self._port, timeout=TIMEOUT_S, context=self._context
        )
        with closing(connection):
            try:
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
