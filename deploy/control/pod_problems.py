"""The problem that keeps a worker's pod from getting ready, from its status in Kubernetes. Pure.

Volumes that cannot be mounted (a Secret that is missing) are events, not status: such a pod shows
no problem, and its worker is overdue after the time of a start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from baton.planner.overdue_workers import OverdueReason, WorkerProblem
from baton.runtime.errors import BatonError

CRASHES = 3  # starts of a container, after which one that is not ready counts as crashing
DETAIL_CHARS = 300
_WAITING: Mapping[str, OverdueReason] = {
    "ErrImagePull": "image",
    "ImagePullBackOff": "image",
    "InvalidImageName": "image",
    "ErrImageNeverPull": "image",
    "ImageInspectError": "image",
    "RegistryUnavailable": "image",
    "CreateContainerConfigError": "config",
    "CreateContainerError": "config",
    "RunContainerError": "config",
    "CrashLoopBackOff": "crash",
}


def pod_problem(pod: Mapping[str, Any]) -> WorkerProblem | None:
    """Return what keeps a pod from getting ready; None if it does not say. Raises BatonError for
    an answer that is no pod."""
    try:
        return _problem_of(pod)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BatonError(f"the Kubernetes API answered with no Pod ({error!r})") from error


def _problem_of(pod: Mapping[str, Any]) -> WorkerProblem | None:
    name, status = str(pod["metadata"]["name"]), pod.get("status", {})
    for condition in status.get("conditions") or ():
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = condition.get("message") or condition.get("reason", "")
            return _problem("no_node", name, str(text))
    for container in _containers(status):
        waiting = container.get("state", {}).get("waiting") or {}
        reason = _WAITING.get(str(waiting.get("reason")))
        if reason is not None and reason != "crash":
            text = f"{waiting['reason']}: {waiting.get('message', '')}"
            return _problem(reason, name, text)
        crashes = int(container.get("restartCount", 0)) >= CRASHES and not container.get("ready")
        if reason == "crash" or crashes:
            return _problem("crash", name, _last_end(container))
    if status.get("phase") == "Failed":
        return _problem("crash", name, str(status.get("message") or status.get("reason", "")))
    return None


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _last_end(container: Mapping[str, Any]) -> str:
    ended = container.get("lastState", {}).get("terminated") or {}
    why = f"{ended.get('reason', 'unknown reason')}, exit code {ended.get('exitCode', 'unknown')}"
    return (
        f"its container {container.get('name')} has ended {container.get('restartCount')} times, "
        f"at last with {why}"
    )


def _problem(reason: OverdueReason, pod: str, text: str) -> WorkerProblem:
    words = " ".join(text.split())[:DETAIL_CHARS]
    return WorkerProblem(reason, f"pod {pod}: {words or reason}")
