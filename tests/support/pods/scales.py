"""The scale subresource of StatefulSets, as the API server answers for it, and faults of that.

GET, PATCH /apis/apps/v1/namespaces/NAMESPACE/statefulsets/NAME/scale[?dryRun=All]
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]
SCALE = re.compile(
    r"/apis/apps/v1/namespaces/(?P<namespace>[^/]+)/statefulsets/(?P<name>[^/]+)/scale"
    r"(?P<dry>\?dryRun=All)?"
)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(slots=True)
class Scales:
    """`replicas` by name; `changed` is called with each new number. `refuses` is a status for each
    real PATCH. While `answering` is clear, calls wait."""

    replicas: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    changed: Callable[[str, int], None] = lambda name, replicas: None
    refuses: int = 0
    answering: threading.Event = field(default_factory=_set_event)
    patched: list[tuple[str, int]] = field(default_factory=list)

    def put(self, name: str, replicas: int) -> None:
        """Set a number as a user would."""
        self.replicas[name] = replicas
        self.versions[name] = self.versions.get(name, 0) + 1

    def applied(self, document: Document) -> Document:
        """Return an object as it is once it was applied: a StatefulSet that says no number keeps
        the one that it has."""
        if document["kind"] != "StatefulSet":
            return document
        name = document["metadata"]["name"]
        self.put(name, int(document["spec"].get("replicas", self.replicas.get(name, 1))))
        return scaled(document, self.replicas[name])

    def answer(self, method: str, name: str, body: Document, *, dry: bool) -> tuple[int, Document]:
        """Return status and object of a call."""
        self.answering.wait()
        if name not in self.replicas:
            return 404, {"message": f"{name} not found"}
        if method == "PATCH":
            if body["metadata"]["resourceVersion"] != str(self.versions[name]):
                return 409, {"message": f"{name} has changed"}
            if dry:
                return 200, self._scale(name, body["spec"]["replicas"])
            if self.refuses:
                return self.refuses, {"message": "the server is closing"}
            self.put(name, int(body["spec"]["replicas"]))
            self.patched.append((name, self.replicas[name]))
            self.changed(name, self.replicas[name])
        elif method != "GET":
            return 405, {"message": f"{method} is not allowed"}
        return 200, self._scale(name, self.replicas[name])

    def _scale(self, name: str, replicas: int) -> Document:
        spec = {"replicas": replicas} if replicas else {}  # the API leaves a 0 out
        version = str(self.versions[name])
        return {"kind": "Scale", "metadata": {"name": name, "resourceVersion": version},
                "spec": spec, "status": {"replicas": replicas}}  # fmt: skip


def scaled(document: Document, replicas: int) -> Document:
    """Return an object with another number of pods."""
    return document | {"spec": document["spec"] | {"replicas": replicas}}
