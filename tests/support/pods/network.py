"""The network of a release: an address for each pod, Services, and NetworkPolicies.

A Service's own address is translated where a pod calls it (nftables, `dnat`), to one of the pods
behind it that are ready. A policy is a filter at both ends of a call, in the pods' own namespaces;
the machine, from which probes come, is always admitted, as a node is. Selectors, `endPort` and
peers by pods and namespaces are understood; all pods here are in one namespace.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chaos.network import Network, unavailable

NFT_S = 20
SERVICES = "10.96.0.0/16"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A pod, as the network knows it. `ready`: Services send to it."""

    name: str
    address: str
    labels: Mapping[str, str]
    ready: bool


def network_unavailable() -> str | None:
    """Return why no release can run here, None where it can."""
    if shutil.which("nft") is None:
        return "nft (Debian's package nftables) not found"
    return unavailable()


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector (matchLabels, matchExpressions) takes these labels. Raises
    ValueError for an operator but In."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for each in selector.get("matchExpressions", ()):
        if each["operator"] != "In":
            raise ValueError(f"the operator {each['operator']} is not known here")
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def policy_rules(
    endpoint: Endpoint, policies: Iterable[Mapping[str, Any]], others: Sequence[Endpoint], node: str
) -> str:
    """Return the nftables table of one pod's policies."""
    own = [
        each["spec"] for each in policies if selects(each["spec"]["podSelector"], endpoint.labels)
    ]
    lines = [
        "add table inet pod_policies",
        "flush table inet pod_policies",
        "table inet pod_policies {",
    ]
    for way, hook, key, end in (
        ("Ingress", "input", "ingress", "saddr"), ("Egress", "output", "egress", "daddr"),
    ):  # fmt: skip
        lines += [
            f"chain {hook} {{ type filter hook {hook} priority 10; policy accept;",
            f'{"iif" if hook == "input" else "oif"} "lo" accept',
            "ct state established,related accept",
        ]
        if hook == "input":
            lines.append(f"ip saddr {node} accept")
        confining = [each for each in own if way in each.get("policyTypes", ["Ingress"])]
        for spec in confining:
            for rule in spec.get(key, ()):
                lines += _accepted(rule, "from" if key == "ingress" else "to", end, others)
        lines += ["drop", "}"] if confining else ["}"]
    return "\n".join([*lines, "}"])


def _accepted(
    rule: Mapping[str, Any], peers: str, end: str, others: Sequence[Endpoint]
) -> list[str]:
    where = [""]
    if rule.get(peers):
        found = sorted({e.address for e in others if any(_peer(p, e) for p in rule[peers])})
        where = [f"ip {end} {{ {', '.join(found)} }} "] if found else []
    ports = [
        f"{each.get('protocol', 'TCP').lower()} dport {each['port']}-{each['endPort']} "
        if "endPort" in each
        else f"{each.get('protocol', 'TCP').lower()} dport {each['port']} "
        for each in rule.get("ports", ())
    ] or [""]
    return [f"{match}{port}accept" for match in where for port in ports]


def _peer(peer: Mapping[str, Any], endpoint: Endpoint) -> bool:
    if "ipBlock" in peer:
        raise ValueError("peers by ipBlock are not known here")
    if peer.get("namespaceSelector", {}).get("matchLabels"):
        return False  # of another namespace
    return selects(peer.get("podSelector", {}), endpoint.labels)


def service_rules(targets: Mapping[tuple[str, int], Sequence[tuple[str, int]]]) -> str:
    """Return the nftables table that sends (address, port) of Services to pods in turn."""
    lines = ["add table ip pod_services", "flush table ip pod_services", "table ip pod_services {",
             "chain calls { type nat hook output priority -100; policy accept;"]  # fmt: skip
    for (address, port), pods in sorted(targets.items()):
        for number, (pod, inner) in enumerate(pods):
            left = len(pods) - number
            turn = f"numgen random mod {left} == 0 " if left > 1 else ""
            lines.append(f"ip daddr {address} tcp dport {port} {turn}dnat to {pod}:{inner}")
    lines += ["}", "chain refused { type filter hook output priority 5; policy accept;"]
    lines.append(f"ip daddr {SERVICES} reject")  # a Service without a ready pod
    return "\n".join([*lines, "}", "}"])


class PodNetwork:
    """Namespaces of pods. `add` gives the command that enters a pod's, and its address."""

    def __init__(self) -> None:
        self._network = Network()
        self._loaded: dict[tuple[str, str], str] = {}

    def __enter__(self) -> PodNetwork:
        self._network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._network.close()

    @property
    def node(self) -> str:
        """The address of this machine."""
        return self._network.machine

    def add(self, name: str) -> tuple[tuple[str, ...], str]:
        prefix = self._network.add(name).prefix
        self._run(prefix, "ip", "route", "add", "default", "via", self.node)
        return prefix, self._network.address(name)

    def load(self, name: str, rules: str, table: str) -> None:
        """Put rules of nftables in place of those of a pod's table, if they are others."""
        if self._loaded.get((name, table)) != rules:
            self._run(self._network.add(name).prefix, "nft", "-f", "-", text=rules)
            self._loaded[name, table] = rules

    def forget(self, name: str) -> None:
        for table in ("services", "policy"):
            self._loaded.pop((name, table), None)

    def _run(self, prefix: tuple[str, ...], *command: str, text: str = "") -> None:
        done = subprocess.run(
            [*prefix, *command], input=text, capture_output=True, text=True, timeout=NFT_S,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}\n{text}")
