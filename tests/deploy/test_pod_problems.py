"""Problems of pods that do not get ready, from statuses as the API server gives them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from baton.deploy.control.pod_problems import DETAIL_CHARS, SHORT_RUN_S, pod_problem
from baton.planner.overdue_workers import WorkerProblem
from baton.runtime.errors import BatonError
from tests.support.json_values import Json, JsonObject

UNSCHEDULED: JsonObject = {
    "phase": "Pending",
    "conditions": [
        {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "0/3 nodes are available:\n 3 Insufficient nvidia.com/gpu.",
        }
    ],
}
SCHEDULED = {"type": "PodScheduled", "status": "True"}


def container(*, init: bool = False, **status: Json) -> JsonObject:
    kind = "initContainerStatuses" if init else "containerStatuses"
    made = {"name": "worker", "ready": False, "restartCount": 0, "state": {}, "lastState": {}}
    return {"phase": "Pending", "conditions": [SCHEDULED], kind: [made | status]}


def waiting(reason: str, message: str = "", **more: Json) -> JsonObject:
    return container(state={"waiting": {"reason": reason, "message": message}}, **more)


def ended(exit_code: int, reason: str, run_s: float = 30.0) -> JsonObject:
    """Return the last state of a container, whose run took so long."""
    over = datetime(2026, 5, 1, 12, 0, tzinfo=UTC)
    began = over - timedelta(seconds=run_s)
    times = {"startedAt": f"{began:%FT%TZ}", "finishedAt": f"{over:%FT%TZ}"}
    return {"terminated": {"exitCode": exit_code, "reason": reason, **times}}


KILLED = ended(137, "OOMKilled")
DRAINED = ended(0, "Completed")
SERVED_LONG = ended(1, "Error", SHORT_RUN_S + 1)
UNTIMED = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None,
                          "finishedAt": None}}  # fmt: skip
RUNS: JsonObject = {"running": {}}
FAULTS: dict[str, tuple[JsonObject, str]] = {
    "no_node": (UNSCHEDULED, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
    "image": (waiting("ImagePullBackOff", "Back-off pulling image"), "ImagePullBackOff: Back-off"),
    "image_of_init": (waiting("ErrImagePull", "not found", init=True), "ErrImagePull: not found"),
    "config": (
        waiting("CreateContainerConfigError", 'secret "mine" not found'),
        'CreateContainerConfigError: secret "mine" not found',
    ),
    "crash": (
        waiting("CrashLoopBackOff", "back-off", restartCount=2, lastState=KILLED),
        "its container worker has ended 2 times, at last with OOMKilled, exit code 137",
    ),
    "crash_that_runs": (
        container(restartCount=3, lastState=KILLED, state=RUNS),
        "its container worker has ended 3 times",
    ),
    "crash_of_all": ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pods_status_says_what_is_wrong(fault: str) -> None:
    status, text = FAULTS[fault]
    found = pod_problem({"metadata": {"name": "w-3"}, "status": status})
    assert found is not None and fault.startswith(found.reason)
    assert found.detail.startswith(f"pod w-3: {text}")


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"phase": "Pending", "conditions": None, "containerStatuses": None},
        waiting("ContainerCreating"),
        waiting("PodInitializing"),
        container(restartCount=2, lastState=KILLED, state=RUNS),
        container(restartCount=9, ready=True, lastState=KILLED, state=RUNS),
        container(restartCount=9, lastState=DRAINED, state=RUNS),
        waiting("CrashLoopBackOff", "back-off", restartCount=9, lastState=DRAINED),
        container(restartCount=9, lastState=SERVED_LONG, state=RUNS),
        container(restartCount=9, lastState=UNTIMED, state=RUNS),
    ],
)
def test_a_pod_that_starts_has_no_problem(status: JsonObject) -> None:
    assert pod_problem({"metadata": {"name": "w-3"}, "status": status}) is None


def test_a_long_message_is_cut() -> None:
    status = waiting("ErrImagePull", "x" * 5000)
    found = pod_problem({"metadata": {"name": "w-3"}, "status": status})
    assert isinstance(found, WorkerProblem) and len(found.detail) <= DETAIL_CHARS + 20


@pytest.mark.parametrize("answer", [{}, {"metadata": {}}, {"metadata": {"name": "w"}, "status": 3}])
def test_another_answer_is_no_pod(answer: JsonObject) -> None:
    with pytest.raises(BatonError, match="answered with no Pod"):
        pod_problem(answer)
