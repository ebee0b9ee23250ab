"""The problem that keeps a worker's pod from getting ready, from its status in Kubernetes. Pure.

A container crashes if its last run ended with an error and Kubernetes says that it waits in its
back-off, or, while it runs between two crashes, if that run was short. The number of its restarts
alone does not show that: it grows over the life of a pod, and a drain, which ends with exit code 0,
counts in it. Volumes that cannot be mounted (a Secret that is missing) are events, not status: such
a pod shows no problem, and its worker is overdue after the time of a start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from baton.planner.overdue_workers import OverdueReason, WorkerProblem
from baton.runtime.errors import BatonError

CRASHES = 3  # restarts, before which a run that failed may be the only one
SHORT_RUN_S = 600.0  # after a longer run Kubernetes begins its back-off again: it was no crash loop
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
        if (reason == "crash" and _ended_with_error(container)) or _crashes(container):
            return _problem("crash", name, _last_end(container))
    if status.get("phase") == "Failed":
        return _problem("crash", name, str(status.get("message") or status.get("reason", "")))
    return None


def _containers(status: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from status.get("initContainerStatuses") or ()
    yield from status.get("containerStatuses") or ()


def _ended_with_error(container: Mapping[str, Any]) -> bool:
    """Return whether the last run did, as far as is known. A drain ends with exit code 0, also one
    that comes again and again."""
    ended = container.get("lastState", {}).get("terminated") or {}
    return bool(ended.get("exitCode", 1))


def _crashes(container: Mapping[str, Any]) -> bool:
    """Return whether a container that is not in its back-off now will be again: its last run was
    short and ended with an error. One without its times was lost with its node."""
    if container.get("ready") or int(container.get("restartCount", 0)) < CRASHES:
        return False
    ended = container.get("lastState", {}).get("terminated") or {}
    began, over = ended.get("startedAt"), ended.get("finishedAt")
    if not ended.get("exitCode") or began is None or over is None:
        return False
    run_s = (datetime.fromisoformat(over) - datetime.fromisoformat(began)).total_seconds()
    return run_s <= SHORT_RUN_S


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
