"""The views of pods that `kubectl` prints: tables, and the description of one. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.support.pods.pod import Event, Pod

NODE = "this-machine"
SIGNAL_CODES = 128  # a container that a signal has ended shows this and the signal's number


def table(rows: Sequence[Sequence[object]]) -> str:
    """Return rows in columns."""
    texts = [[str(each) for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = ["   ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    return "".join(f"{line}\n" for line in lines)


def age(since_s: float) -> str:
    return f"{time.monotonic() - since_s:.0f}s"


def status_of(pod: Pod) -> str:
    """Return the column STATUS of a pod."""
    wanted, there = len(pod.spec["containers"]), pod.containers
    if pod.terminating:
        return "Terminating"
    if pod.code is not None:
        return "Completed" if pod.code == 0 else "Error"
    if pod.spec.get("restartPolicy", "Always") == "Always" and len(there) < wanted:
        return f"Init:{pod.initialised}/{len(pod.spec.get('initContainers', ()))}"
    return "Error" if any(each.container.code not in (None, 0) for each in there) else "Running"


def pod_rows(pods: Sequence[Pod], *, wide: bool) -> list[Sequence[object]]:
    """Return the table of `kubectl get pods`."""
    more = ("IP", "NODE") if wide else ()
    rows: list[Sequence[object]] = [("NAME", "READY", "STATUS", "RESTARTS", "AGE", *more)]
    for pod in pods:
        ready = sum(each.ready for each in pod.containers)
        wider = (pod.address, NODE) if wide else ()
        rows.append((
            pod.name, f"{ready}/{len(pod.spec['containers'])}", status_of(pod), pod.restarts,
            age(pod.made_s), *wider,
        ))  # fmt: skip
    return rows


def event_rows(events: Sequence[Event]) -> list[Sequence[object]]:
    """Return the table of `kubectl get events`."""
    rows: list[Sequence[object]] = [("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")]
    return rows + [
        (age(each.at_s), each.kind, each.reason, f"pod/{each.pod}", each.message)
        for each in list(events)
    ]


def described(pod: Pod, events: Sequence[Event]) -> str:
    """Return what `kubectl describe pod` shows, as far as the runner has it."""
    lines = [
        f"Name:    {pod.name}",
        f"Node:    {NODE}",
        f"Status:  {status_of(pod)}",
        f"IP:      {pod.address}",
        *(f"Label:   {name}={value}" for name, value in sorted(pod.labels.items())),
        "Containers:",
    ]
    for each in pod.containers:
        code = each.container.code
        lines += [
            f"  {each.spec['name']}:",
            f"    Image:          {each.spec['image']}",
            f"    State:          {'Running' if code is None else 'Terminated'}",
        ]
        if each.last_code is not None:
            lines += [
                "    Last State:     Terminated",
                f"      Exit Code:    {shown(each.last_code)}",
            ]
        lines += [
            f"    Ready:          {each.ready}",
            f"    Restart Count:  {each.restarts}",
        ]
    return "\n".join([*lines, "Events:", table(event_rows(events))])


def shown(code: int) -> int:
    """Return an exit code as Kubernetes shows it; one of a signal is negative here."""
    return code if code >= 0 else SIGNAL_CODES - code
