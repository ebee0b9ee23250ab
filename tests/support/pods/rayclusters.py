"""RayClusters and pods, as the API server answers for them, and faults of that.

GET, PATCH /apis/ray.io/v1/namespaces/NAMESPACE/rayclusters/NAME[?dryRun=All], by JSON patch
GET /api/v1/namespaces/NAMESPACE/pods?labelSelector=NAME%3DVALUE,...&limit=N[&continue=TEXT]
GET /api/v1/namespaces/NAMESPACE/pods/NAME
GET /apis/ray.io/v1, which Helm asks before it looks an object up
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from tests.support.json_values import Json
from tests.support.pods.kuberay import patched

Document = dict[str, Any]
RAYCLUSTER = re.compile(
    r"/apis/ray\.io/v1/namespaces/(?P<namespace>[^/]+)/rayclusters/(?P<name>[^/?]+)"
    r"(?P<dry>\?dryRun=All)?"
)
DISCOVERY = "/apis/ray.io/v1"
RESOURCES: Document = {
    "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "ray.io/v1",
    "resources": [{"name": "rayclusters", "singularName": "raycluster", "namespaced": True,
                   "kind": "RayCluster", "verbs": ["get", "patch"]}],
}  # fmt: skip
POD = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods/(?P<name>[^/?]+)")
PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods\?(?P<query>.+)")


@dataclass(slots=True)
class RayClusters:
    """The objects by name, each with its version. `pods` returns those of the namespace; `changed`
    is called with each object that was patched. `refuses` is a status for each real PATCH,
    `unanswered` lets it be made all the same."""

    objects: dict[str, Document] = field(default_factory=dict)
    pods: Callable[[], list[Document]] = list
    changed: Callable[[Document], None] = lambda document: None
    refuses: int = 0
    unanswered: bool = False
    patches: list[list[Document]] = field(default_factory=list)
    listed: int = 0

    def put(self, document: Document) -> Document:
        """Store an object as a user would, and as the operator does with its status."""
        name = document["metadata"]["name"]
        before = self.objects.get(name, {}).get("metadata", {}).get("resourceVersion", "0")
        stored = copy.deepcopy(document)
        stored["metadata"]["resourceVersion"] = str(int(before) + 1)
        self.objects[name] = stored
        return stored

    def patch(self, name: str, operations: Sequence[Document]) -> None:
        """Change an object. Raises ValueError or LookupError (`patched`)."""
        self.changed(self.put(patched(self.objects[name], operations)))

    def answer(self, method: str, name: str, body: Json, *, dry: bool) -> tuple[int, Document]:
        """Return status and object of a call."""
        if name not in self.objects:
            return 404, {"message": f"{name} not found"}
        if method == "PATCH":
            try:
                made = patched(self.objects[name], body)
            except (ValueError, LookupError) as error:
                return 422, {"message": f"the server rejected the patch: {error}"}
            if dry:
                return 200, made
            if self.refuses and not self.unanswered:
                return self.refuses, {"message": "the server is closing"}
            self.patches.append(body)
            self.patch(name, body)
            if self.refuses:
                return self.refuses, {"message": "the answer got lost"}
        elif method != "GET":
            return 405, {"message": f"{method} is not allowed"}
        return 200, self.objects[name]

    def pod(self, name: str) -> tuple[int, Document]:
        """Return a pod by its name."""
        found = [each for each in self.pods() if each["metadata"]["name"] == name]
        return (200, found[0]) if found else (404, {"message": f"{name} not found"})

    def list_pods(self, query: str) -> tuple[int, Document]:
        """Return a page of the pods that a selector finds."""
        self.listed += 1
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        wanted = dict(each.split("=") for each in asked["labelSelector"].split(","))
        found = [e for e in self.pods() if wanted.items() <= e["metadata"]["labels"].items()]
        first = int(asked.get("continue", 0))
        last = first + int(asked["limit"])
        more = {"continue": str(last)} if last < len(found) else {}
        return 200, {"kind": "PodList", "metadata": more, "items": found[first:last]}


def timestamp(number: int) -> str:
    """Return the time at which the pod with this number counts as made."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_767_225_600 + number))
