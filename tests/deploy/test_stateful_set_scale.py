"""The scale of a StatefulSet over the Kubernetes API: what is asked, refused, late or not there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.deploy.cli.main import main
from baton.deploy.control import kubernetes_calls
from baton.deploy.control.resize_target import ResizeTarget, bounds_of, target_of
from baton.deploy.control.stateful_set_scale import MAX_ASKED, StatefulSetScale
from baton.deploy.host.kubernetes_api import KubernetesApi, own_namespace
from baton.planner.control.worker_count import WorkerCount
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.machine_speed import slowness
from tests.support.pods.rayclusters import RayClusters
from tests.support.pods.secrets_server import SecretsServer

NAME = "chat-baton-worker"
RULES = [
    {
        "apiGroups": ["apps"],
        "resources": ["statefulsets/scale"],
        "resourceNames": [NAME],
        "verbs": ["get", "patch"],
    }
]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecretsServer]:
    made = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    made.roles["controller"] = RULES
    made.scales.put(NAME, 3)
    made.scales.put("another", 3)
    yield made
    made.close()


@pytest.fixture
def account(server: SecretsServer, tmp_path: Path) -> Path:
    return server.mounted_account("controller", tmp_path / "account")


def scale_of(server: SecretsServer, account: Path, name: str = NAME) -> StatefulSetScale:
    api = KubernetesApi("127.0.0.1", server.port, account, 2.0 * slowness())
    return StatefulSetScale(api, "llm", name)


async def test_the_number_is_read_and_changed(server: SecretsServer, account: Path) -> None:
    scale = scale_of(server, account)
    seen = await scale.count()
    assert (seen.asked, seen.last_id) == (3, f"{NAME}-2")
    assert WorkerCount("1", ()).last_id is None
    await scale.check(seen, 5)
    assert server.scales.replicas[NAME] == 3  # a dry run changes nothing
    await scale.resize(seen, 5)
    assert server.scales.patched == [(NAME, 5)]
    assert (await scale.count()).asked == 5
    server.scales.put(NAME, 0)
    assert (await scale.count()).asked == 0


async def test_a_number_that_another_has_changed_stays(
    server: SecretsServer, account: Path
) -> None:
    """A user, or another leader, was faster."""
    scale = scale_of(server, account)
    seen = await scale.count()
    server.scales.put(NAME, 7)
    for call in (scale.check, scale.resize):
        with pytest.raises(BatonError, match="with 409: chat-baton-worker has changed"):
            await call(seen, 2)
    assert server.scales.replicas[NAME] == 7


async def test_an_account_may_change_one_scale_alone(server: SecretsServer, account: Path) -> None:
    with pytest.raises(BatonError, match="403: controller may not get the scale of another"):
        await scale_of(server, account, "another").count()
    server.roles["controller"] = [{**RULES[0], "verbs": ["get"]}]
    seen = await scale_of(server, account).count()
    with pytest.raises(BatonError, match="403: controller may not patch"):
        await scale_of(server, account).check(seen, 4)
    assert server.scales.patched == []


async def test_a_slow_api_is_not_waited_for(
    server: SecretsServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its change may be made all the same, which the next reading shows."""
    scale = scale_of(server, account)
    seen = await scale.count()
    loop, made = asyncio.get_running_loop(), asyncio.Event()

    def changed(name: str, workers: int) -> None:
        loop.call_soon_threadsafe(made.set)

    server.scales.changed = changed
    server.scales.answering.clear()
    with monkeypatch.context() as short:
        short.setattr(kubernetes_calls, "API_TIMEOUT_S", 0.2 * slowness())
        with pytest.raises(Unavailable, match="has not answered within .* s; a change"):
            await scale.resize(seen, 4)
    server.scales.answering.set()
    async with asyncio.timeout(10.0):
        await made.wait()
    assert (await scale.count()).asked == 4


def hold_up_loop(seconds: float) -> None:
    """Let no task run, so that none gives a call up."""
    # the loop itself has to stand still: while it waits for an event, it runs other tasks
    time.sleep(seconds)


@pytest.mark.parametrize("reason", ["given up", "late", "wanted"])
async def test_a_request_that_has_not_left_in_time_never_does(
    server: SecretsServer, account: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """Its connection stands once its caller has been cancelled, or, where the whole process was
    held up, after its time."""
    scale = scale_of(server, account)
    seen = await scale.count()
    loop, connected, may_go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    connect = HTTPSConnection.connect

    def held(connection: HTTPSConnection) -> None:
        connect(connection)
        loop.call_soon_threadsafe(connected.set)
        may_go_on.wait()

    monkeypatch.setattr(HTTPSConnection, "connect", held)
    if reason == "late":
        monkeypatch.setattr(kubernetes_calls, "API_TIMEOUT_S", 0.3)
    resizing = asyncio.create_task(scale.resize(seen, 4))
    await connected.wait()
    if reason == "given up":
        resizing.cancel()
        await asyncio.wait({resizing})
    elif reason == "late":
        hold_up_loop(0.4)
    may_go_on.set()
    if reason == "late":
        hold_up_loop(0.2)  # while the thread goes on
    await asyncio.wait({resizing})
    await loop.shutdown_default_executor()  # the thread of the call has ended
    assert server.scales.patched == ([(NAME, 4)] if reason == "wanted" else [])


async def test_an_api_that_is_gone_is_named(account: Path) -> None:
    scale = StatefulSetScale(KubernetesApi("127.0.0.1", 1, account), "llm", NAME)
    with pytest.raises(Unavailable, match="127.0.0.1:1 does not answer"):
        await scale.resize(WorkerCount("1", (f"{NAME}-0", f"{NAME}-1")), 4)


PULLED = {"name": "worker", "state": {"waiting": {"reason": "ImagePullBackOff"}}}


async def test_a_pod_says_why_its_worker_is_missing(server: SecretsServer, account: Path) -> None:
    names = [f"{NAME}-{number}" for number in range(3)]
    server.roles["controller"] = [
        *RULES, {"resources": ["pods"], "verbs": ["get"], "resourceNames": names}
    ]  # fmt: skip
    server.rayclusters.pods = lambda: [
        {"metadata": {"name": names[0]}, "status": {"containerStatuses": [PULLED]}},
        {"metadata": {"name": names[1]}, "status": {"phase": "Running"}},
    ]
    found = await scale_of(server, account).problems(names)
    assert {name: each.reason for name, each in found.items()} == {
        names[0]: "image", names[2]: "no_pod"
    }  # fmt: skip
    assert found[names[0]].detail == f"pod {names[0]}: ImagePullBackOff:"
    assert found[names[2]].detail == f"there is no pod {names[2]}"
    with pytest.raises(BatonError, match="403: controller may not get the pod another-0"):
        await scale_of(server, account).problems(["another-0"])


async def test_a_pod_that_is_not_read_hides_no_other(
    server: SecretsServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account may not read one, and another one's answer is late."""
    slow, forbidden, *others = (f"{NAME}-{number}" for number in range(6))
    allowed = [slow, *others]
    server.roles["controller"] = [
        {"resources": ["pods"], "verbs": ["get"], "resourceNames": allowed}
    ]
    answering, answer = threading.Event(), server.rayclusters.pod

    def pod(_: RayClusters, name: str) -> tuple[int, dict[str, object]]:
        if name == slow:
            answering.wait()
        return answer(name)

    monkeypatch.setattr(RayClusters, "pod", pod)
    monkeypatch.setattr(kubernetes_calls, "API_TIMEOUT_S", slowness())
    with capture_logs() as logs:
        found = await scale_of(server, account).problems([slow, forbidden, *others])
    assert {name: each.reason for name, each in found.items()} == dict.fromkeys(others, "no_pod")
    (event,) = [each for each in logs if each["event"] == "pods not read"]
    assert event["pods"] == [slow, forbidden]
    with pytest.raises(BatonError, match="not answered within .* s|403"):
        await scale_of(server, account).problems([slow, forbidden])
    answering.set()


async def test_pods_are_asked_for_in_turns(server: SecretsServer, account: Path) -> None:
    """What is known of the others stays."""
    names = [f"{NAME}-{number}" for number in range(MAX_ASKED + 4)]
    server.roles["controller"] = [{"resources": ["pods"], "verbs": ["get"], "resourceNames": names}]
    scale = scale_of(server, account)
    assert list(await scale.problems(names)) == names[:MAX_ASKED]
    assert list(await scale.problems(names)) == names
    assert list(await scale.problems(names[1:])) == names[1:]
    assert await scale.problems([]) == {}


async def test_a_token_that_was_replaced_is_used(server: SecretsServer, account: Path) -> None:
    """Kubernetes writes another one before the first expires."""
    scale = scale_of(server, account)
    (account / "token").write_text("expired")
    with pytest.raises(BatonError, match="401"):
        await scale.count()
    (account / "token").write_bytes(server.account_files("controller")["token"])
    assert (await scale.count()).asked == 3


async def test_another_answer_is_no_scale(
    server: SecretsServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(server.scales), "answer", lambda *_, **__: (200, {"kind": "Status"}))
    with pytest.raises(BatonError, match="answered with no Scale"):
        await scale_of(server, account).count()


def test_the_namespace_is_the_pods_own(account: Path, tmp_path: Path) -> None:
    assert own_namespace(account) == "llm"
    with pytest.raises(ConfigError, match="automountServiceAccountToken"):
        own_namespace(tmp_path / "none")


def test_options_are_read_with_their_remedy() -> None:
    assert bounds_of("2-8") == (2, 8)
    assert target_of("statefulset/a") == ResizeTarget("statefulset", "a")
    assert target_of("fleet") == ResizeTarget("fleet")
    assert target_of("raycluster/a/worker") == ResizeTarget("raycluster", "a", "worker")
    for wrong in ("a", "deployment/a", "statefulset/", "statefulset/a/b", "fleet/a", "",
                  "raycluster", "raycluster/a", "raycluster//b", "raycluster/a/b/c"):  # fmt: skip
        with pytest.raises(ConfigError, match="write it as statefulset/NAME"):
            target_of(wrong)
    for wrong in ("2", "2-", "a-b", "-1-4"):
        with pytest.raises(ConfigError, match="write it as MIN-MAX"):
            bounds_of(wrong)
    for wrong in ("1-4", "5-4"):
        with pytest.raises(ConfigError, match="MIN is at least 2"):
            bounds_of(wrong)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resize=statefulset/a", "--workers=2-4"], "give --act and --workers too"),
        (["--act", "--resize=statefulset/a"], "give --act and --workers too"),
        (["--act", "--workers=2-4"], "--resize, which is not given"),
        (["--act", "--resize=pod/a", "--workers=2-4"], "write it as statefulset/NAME"),
        (["--act", "--resize=statefulset/a", "--workers=1-4"], "MIN is at least 2"),
        (["--act", "--resize=statefulset/a", "--workers=2-4", "--release-s=-1"], "--release-s is"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["controller", *flags]) != 0
    assert words in capsys.readouterr().err
