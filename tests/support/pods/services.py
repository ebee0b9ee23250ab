"""Services of a namespace: their addresses, their names, and the ready pods behind each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.support.pods.manifests import service_address, target_port
from tests.support.pods.network import selects
from tests.support.pods.pod import Pod

Document = dict[str, Any]


class Services:
    """`wanted` returns the objects, `pods` all pods; `zone` is what ends each name."""

    def __init__(
        self, wanted: Callable[[], list[Document]], pods: Callable[[], list[Pod]], zone: str
    ) -> None:
        self._wanted, self._pods, self._zone = wanted, pods, zone

    def lookup(self, name: str) -> list[str] | None:
        """Return the addresses of NAME.ZONE, None if there is none."""
        service, _, rest = name.partition(".")
        found = self._find(service)
        if found is None or rest != self._zone:
            return None
        if found["spec"].get("clusterIP") == "None":
            early = bool(found["spec"].get("publishNotReadyAddresses"))
            return [each.address for each in self._behind(found) if each.ready or early]
        return [service_address(service)]

    def ready_pods(self, name: str) -> list[Pod]:
        """Return the ready pods behind a Service. Raises KeyError for one that is not there."""
        found = self._find(name)
        if found is None:
            raise KeyError(f"the Service {name} is not there")
        return [each for each in self._behind(found) if each.ready]

    def port_of(self, pod: Pod, name: str, number: int) -> int:
        """Return the port of a pod behind a Service's port. Raises LookupError."""
        found = self._find(name)
        ports = found["spec"]["ports"] if found is not None else []
        for each in ports:
            if int(each["port"]) == number:
                return target_port(pod, each["targetPort"])
        raise LookupError(f"the Service {name} has no port {number}")

    def targets(self) -> dict[tuple[str, int], Sequence[tuple[str, int]]]:
        """Return address and port of each ready pod, by address and port of its Service."""
        return {
            (service_address(each["metadata"]["name"]), int(port["port"])): [
                (pod.address, target_port(pod, port["targetPort"]))
                for pod in self._behind(each)
                if pod.ready
            ]
            for each in self._wanted()
            if each["spec"].get("clusterIP") != "None"
            for port in each["spec"]["ports"]
        }

    def _find(self, name: str) -> Document | None:
        return next((each for each in self._wanted() if each["metadata"]["name"] == name), None)

    def _behind(self, service: Document) -> list[Pod]:
        selector = {"matchLabels": service["spec"]["selector"]}
        return [each for each in self._pods() if selects(selector, each.labels)]
