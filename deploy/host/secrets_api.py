"""Secrets of one namespace, through the Kubernetes API, from inside a pod. Holds no state between
calls."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from baton.deploy.host.kubernetes_api import ACCOUNT, KubernetesApi


@dataclass(frozen=True, slots=True)
class Secret:
    """A Secret's name, type and decoded data. `version` is None until the API has stored it."""

    name: str
    data: Mapping[str, bytes]
    kind: str = "Opaque"
    version: str | None = None


class SecretsApi:
    """`host` and `port` of the API server. Raises ConfigError where the account's files are
    missing: the pod has no service account."""

    def __init__(self, namespace: str, host: str, port: int, account: Path = ACCOUNT) -> None:
        self._api = KubernetesApi(host, port, account)
        self._namespace = namespace
        self._path = f"/api/v1/namespaces/{quote(namespace, safe='')}/secrets"

    def read(self, name: str) -> Secret | None:
        """Return the Secret, or None if there is none. Raises BatonError if the API refuses."""
        answer = self._api.call("GET", f"{self._path}/{quote(name, safe='')}", None, {404})
        if answer is None:
            return None
        found = {key: b64decode(value) for key, value in (answer.get("data") or {}).items()}
        version = answer["metadata"]["resourceVersion"]
        return Secret(name, found, answer.get("type", "Opaque"), version)

    def create(self, secret: Secret) -> bool:
        """Store a new Secret. Return False if there is one of this name already."""
        return self._api.call("POST", self._path, self._body(secret), {409}) is not None

    def replace(self, secret: Secret) -> bool:
        """Store new data in place of the version that was read. Return False if it has changed."""
        path = f"{self._path}/{quote(secret.name, safe='')}"
        return self._api.call("PUT", path, self._body(secret), {409}) is not None

    def _body(self, secret: Secret) -> dict[str, Any]:
        metadata = {"name": secret.name, "namespace": self._namespace}
        if secret.version is not None:
            metadata["resourceVersion"] = secret.version
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": secret.kind,
            "data": {key: b64encode(value).decode() for key, value in secret.data.items()},
        }
