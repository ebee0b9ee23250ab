"""The part of the Kubernetes API that pods of the chart call: Secrets of one namespace, the scales
of its StatefulSets (scales.py), its RayClusters and its pods (rayclusters.py).

By HTTPS, with an authority of its own; an account may do what the Roles bound to it say. Holds the
Secrets, as pods mount them too.
"""

from __future__ import annotations

import json
import re
import secrets
import ssl
import threading
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from baton.deploy.host.certificate_forms import (
    Subject,
    general_name,
    key_pem_of,
    new_issuer,
    new_key,
    pem_of,
    process_certificate,
)
from tests.support.json_values import Json
from tests.support.pods.rayclusters import (
    DISCOVERY,
    POD,
    PODS,
    RAYCLUSTER,
    RESOURCES,
    RayClusters,
)
from tests.support.pods.scales import SCALE, Scales

Document = dict[str, Any]
CORE: Document = {
    "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1",
    "resources": [{"name": "secrets", "singularName": "secret", "namespaced": True,
                   "kind": "Secret", "verbs": ["get"]}],
}  # fmt: skip
DISCOVERED = {DISCOVERY: RESOURCES, "/api/v1": CORE}  # what Helm asks before it looks an object up
VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch"}


class SecretsServer:
    """Serves at `address`, at a port that it chooses or is given. `secrets`: the objects, by
    name."""

    def __init__(self, address: str, namespace: str, folder: Path, port: int = 0) -> None:
        self.secrets: dict[str, Document] = {}
        self.roles: dict[str, list[Document]] = {}  # the rules of a service account
        self.refused: list[str] = []
        self.changed: Callable[[str], None] = lambda name: None  # a Secret's name
        self.scales = Scales()
        self.rayclusters = RayClusters()
        self.namespace = namespace
        self._tokens: dict[str, str] = {}  # from a token to its account
        self._changes = 0
        folder.mkdir()
        self._authority = folder / "ca.crt"
        self._server = ThreadingHTTPServer((address, port), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certified(address, folder))
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.address, self.port = address, self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def account_files(self, account: str) -> dict[str, bytes]:
        """Return what Kubernetes mounts into a pod of the account."""
        token = secrets.token_urlsafe(32)
        self._tokens[token] = account
        files = {"token": token, "namespace": self.namespace, "ca.crt": self._authority.read_text()}
        return {name: text.encode() for name, text in files.items()}

    def mounted_account(self, account: str, folder: Path) -> Path:
        """Write those files into a new folder, and return it."""
        folder.mkdir()
        for name, content in self.account_files(account).items():
            (folder / name).write_bytes(content)
        return folder

    def data(self, name: str) -> dict[str, bytes]:
        """Return a Secret's decoded data. Raises KeyError if there is none."""
        return {key: b64decode(value) for key, value in self.secrets[name]["data"].items()}

    def put(self, name: str, data: dict[str, bytes]) -> None:
        """Store a Secret as a user would."""
        encoded = {key: b64encode(value).decode() for key, value in data.items()}
        self._store(name, {"metadata": {"name": name}, "type": "Opaque", "data": encoded})

    def answer(self, method: str, path: str, token: str, body: Json) -> tuple[int, Document]:
        """Return status and object of a call."""
        if token in self._tokens:
            if path.partition("?")[0] in DISCOVERED:
                return 200, DISCOVERED[path.partition("?")[0]]
            if (cluster := RAYCLUSTER.fullmatch(path)) is not None:
                return self._raycluster(method, cluster, token, body)
            if (pods := PODS.fullmatch(path)) is not None:
                return self._pods(method, pods, token)
            if (pod := POD.fullmatch(path)) is not None:
                return self._pod(method, pod, token)
        if (scale := SCALE.fullmatch(path)) is not None and token in self._tokens:
            return self._scale(method, scale, token, body)
        base = f"/api/v1/namespaces/{self.namespace}/secrets"
        name = path.removeprefix(base).lstrip("/") or str(body.get("metadata", {}).get("name", ""))
        account = self._tokens.get(token)
        if account is None or not path.startswith(base):
            return 401, {"message": "Unauthorized"}
        named = "" if method == "POST" else name
        if not self._may(account, VERBS[method], "secrets", named):
            self.refused.append(f"{account} {VERBS[method]} {name}")
            return 403, {"message": f"{account} may not {VERBS[method]} {name}"}
        found = self.secrets.get(name)
        if method == "POST":
            if found is not None:
                return 409, {"message": f"{name} exists"}
            return 201, self._store(name, body)
        if found is None:
            return 404, {"message": f"{name} not found"}
        if method == "PUT":
            if body["metadata"].get("resourceVersion") != found["metadata"]["resourceVersion"]:
                return 409, {"message": f"{name} has changed"}
            return 200, self._store(name, body)
        return 200, {"kind": "Secret", "apiVersion": "v1", **found}

    def _scale(
        self, method: str, found: re.Match[str], token: str, body: Document
    ) -> tuple[int, Document]:
        account, name = self._tokens[token], found["name"]
        may = self._may(account, VERBS[method], "statefulsets/scale", name)
        if not may or found["namespace"] != self.namespace:
            self.refused.append(f"{account} {VERBS[method]} scale of {name}")
            return 403, {"message": f"{account} may not {VERBS[method]} the scale of {name}"}
        return self.scales.answer(method, name, body, dry=bool(found["dry"]))

    def _raycluster(
        self, method: str, found: re.Match[str], token: str, body: Json
    ) -> tuple[int, Document]:
        account, name = self._tokens[token], found["name"]
        may = self._may(account, VERBS[method], "rayclusters", name)
        if not may or found["namespace"] != self.namespace:
            self.refused.append(f"{account} {VERBS[method]} raycluster {name}")
            return 403, {"message": f"{account} may not {VERBS[method]} the RayCluster {name}"}
        return self.rayclusters.answer(method, name, body, dry=bool(found["dry"]))

    def _pods(self, method: str, found: re.Match[str], token: str) -> tuple[int, Document]:
        account = self._tokens[token]
        may = method == "GET" and self._may(account, "list", "pods", "")
        if not may or found["namespace"] != self.namespace:
            self.refused.append(f"{account} list pods")
            return 403, {"message": f"{account} may not list pods"}
        return self.rayclusters.list_pods(found["query"])

    def _pod(self, method: str, found: re.Match[str], token: str) -> tuple[int, Document]:
        account, name = self._tokens[token], found["name"]
        may = method == "GET" and self._may(account, "get", "pods", name)
        if not may or found["namespace"] != self.namespace:
            self.refused.append(f"{account} get pod {name}")
            return 403, {"message": f"{account} may not get the pod {name}"}
        return self.rayclusters.pod(name)

    def _may(self, account: str, verb: str, resource: str, name: str) -> bool:
        return any(
            verb in rule["verbs"]
            and resource in rule["resources"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.roles.get(account, ())
        )

    def _store(self, name: str, body: Document) -> Document:
        self._changes += 1
        body["metadata"]["resourceVersion"] = str(self._changes)
        self.secrets[name] = body
        self.changed(name)
        return body

    def _certified(self, address: str, folder: Path) -> Path:
        now = datetime.now(UTC)
        begin, end = now - timedelta(hours=1), now + timedelta(days=1)
        issuer, key = new_issuer("cluster", begin, end), new_key()
        host = general_name(address, "address")
        made = process_certificate(Subject("api", key.public_key(), (host,)), issuer, begin, end)
        self._authority.write_text(pem_of(issuer.certificate))
        pair = folder / "api.pem"
        pair.write_text(pem_of(made) + key_pem_of(key))
        return pair

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class SecretsHandler(BaseHTTPRequestHandler):
            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, found = server.answer(self.command, self.path, token, body)
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_PUT = do_PATCH = _serve

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return SecretsHandler
