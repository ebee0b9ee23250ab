"""The groups of a RayCluster of KubeRay, and the patches that take pods out of them. Pure.

KubeRay deletes the pods that `workersToDelete` of a group names. Of the others it makes or deletes
as many as `replicas` asks for, any of them, and one that ends counts until it is gone. So a patch
that lowers the number names the pod that leaves, and keeps the names of pods that have not ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.runtime.errors import BatonError

Document = Mapping[str, Any]
Operation = dict[str, Any]
GROUP_LABEL, KIND_LABEL, CLUSTER_LABEL = "ray.io/group", "ray.io/node-type", "ray.io/cluster"
NO_LIMIT = (1 << 31) - 1  # KubeRay's default of maxReplicas


@dataclass(frozen=True, slots=True)
class PodGroup:
    """A group of a RayCluster. `replicas` are those that KubeRay keeps: `written` within the
    bounds `least` and `most`. `named`: the pods in workersToDelete."""

    name: str
    path: str  # of JSON patches
    replicas: int
    written: int | None
    least: int
    most: int
    named: tuple[str, ...]

    def patch(
        self,
        *,
        replicas: int | None = None,
        leaving: str | None = None,
        there: Collection[str] = (),
    ) -> list[Operation]:
        """Return the JSON patch (RFC 6902) that asks for another number of pods, names the pod that
        leaves, or both. Names of pods that are `there` stay. The API refuses it if the number was
        changed since this was read, or if another group is at this index."""
        made: list[Operation] = [
            {"op": "test", "path": f"{self.path}/groupName", "value": self.name}
        ]
        number = f"{self.path}/replicas"
        if self.written is not None:
            made.append({"op": "test", "path": number, "value": self.written})
        if replicas is not None:
            made.append({"op": "add", "path": number, "value": replicas})
        if leaving is not None:
            names = [*(each for each in self.named if each in there and each != leaving), leaving]
            value = {"workersToDelete": names}
            made.append({"op": "add", "path": f"{self.path}/scaleStrategy", "value": value})
        return made


def worker_groups(cluster: Document) -> Sequence[Document]:
    groups: Sequence[Document] = cluster["spec"].get("workerGroupSpecs", ())
    return groups


def worker_group(cluster: Document, name: str) -> PodGroup:
    """Return a group by its name. Raises BatonError if the RayCluster has none."""
    groups = worker_groups(cluster)
    names = [str(each["groupName"]) for each in groups]
    if name not in names:
        raise BatonError(
            f"the RayCluster has no group {name}, it has {', '.join(names) or 'none'}: name the "
            "group as `baton fleet --group` does"
        )
    index = names.index(name)
    found = groups[index]
    least, most = int(found.get("minReplicas", 0)), int(found.get("maxReplicas", NO_LIMIT))
    written = None if found.get("replicas") is None else int(found["replicas"])
    return PodGroup(
        name=name,
        path=f"/spec/workerGroupSpecs/{index}",
        replicas=least if written is None else min(max(written, least), most),
        written=written,
        least=least,
        most=most,
        named=tuple(found.get("scaleStrategy", {}).get("workersToDelete") or ()),
    )
