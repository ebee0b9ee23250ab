"""Workers in pods of a RayCluster: which pod leaves, and what a refusal, a lost answer or a
controller that is killed leave behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.deploy.control import raycluster_workers
from baton.deploy.control.fleet_number import FleetSize
from baton.deploy.control.raycluster_workers import RayClusterWorkers
from baton.deploy.control.resize_target import ResizeTarget
from baton.deploy.host.kubernetes_api import KubernetesApi
from baton.planner.control.size_loop import SizeLoop
from baton.planner.fleet_size import FAILED_S, SHRINK_GAP_S, SizeBounds, SizeController
from baton.runtime.errors import BatonError, Unavailable
from tests.support.pods.secrets_server import SecretsServer
from tests.support.ray_pods import GROUP, NAME, RULES, RayPods, pod_host, pod_name, raycluster
from tests.support.role_loop_scene import RoleLoopScene
from tests.support.scripted_fleet import ScriptedFleet
from tests.support.scripted_number import ScriptedNumber

ON_PODS = (2, 0, 3, 1)  # the pod of decode-0, decode-1, ...: neither the newest nor the oldest last
LAST_POD = pod_name(ON_PODS[-1])
BOUNDS = SizeBounds(least=2, most=8, release_s=20.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SecretsServer]:
    made = SecretsServer("127.0.0.1", "llm", tmp_path / "api")
    made.roles["controller"] = RULES
    yield made
    made.close()


@pytest.fixture
def account(server: SecretsServer, tmp_path: Path) -> Path:
    return server.mounted_account("controller", tmp_path / "account")


class Site:
    """One prefill and four decode workers, each in its pod, and the number that the driver
    follows."""

    def __init__(self, server: SecretsServer, account: Path) -> None:
        self.server, self.account = server, account
        self.pods = RayPods(server)
        self.pods.put(raycluster(5))
        self.number = ScriptedNumber(FleetSize(1, 4))
        self.hosts = {f"decode-{n}": pod_host(pod) for n, pod in enumerate(ON_PODS)}
        self.hosts["prefill-0"] = pod_host(4)

    def workers(self, name: str = NAME, group: str = GROUP) -> RayClusterWorkers:
        api = KubernetesApi("127.0.0.1", self.server.port, self.account, 2.0)
        target = ResizeTarget("raycluster", name, group)
        return RayClusterWorkers(api, "llm", target, self.number, lambda: self.hosts)

    async def shrink(self) -> None:
        workers = self.workers()
        seen = await workers.count()
        await workers.check(seen, seen.asked - 1)
        await workers.resize(seen, seen.asked - 1)


@pytest.fixture
def site(server: SecretsServer, account: Path) -> Site:
    return Site(server, account)


async def test_more_pods_are_asked_for_and_the_driver_follows(site: Site) -> None:
    workers = site.workers()
    seen = await workers.count()
    assert (seen.asked, seen.last_id) == (5, "decode-3")
    await workers.resize(seen, 7)
    assert site.pods.numbers() == [0, 1, 2, 3, 4, 5, 6] and site.pods.named() == []
    assert site.number.size == FleetSize(1, 4)
    seen = await workers.count()
    assert (seen.asked, seen.last_id) == (7, "decode-5")
    assert site.number.size == FleetSize(1, 6)
    assert site.server.rayclusters.listed == 0  # no pod has to be known for that
    await workers.close()
    assert site.number.closed


async def test_the_pod_of_the_last_worker_leaves(site: Site) -> None:
    await site.shrink()
    assert site.pods.numbers() == [0, 2, 3, 4] and site.pods.named() == [LAST_POD]
    (patch,) = site.server.rayclusters.patches  # number and name in one, and no dry run
    assert {each["path"].rpartition("/")[2] for each in patch if each["op"] == "add"} == {
        "replicas", "scaleStrategy"
    }  # fmt: skip
    assert (await site.workers().count()).asked == 4 and site.number.size == FleetSize(1, 3)


async def test_a_pod_that_ends_slowly_costs_no_other(site: Site) -> None:
    """KubeRay counts one that ends, unless it is named: its name has to stay."""
    site.pods.slow = True
    await site.shrink()
    del site.hosts["decode-3"]
    await site.shrink()
    assert site.pods.named() == [LAST_POD, pod_name(ON_PODS[2])]
    assert site.pods.numbers() == [0, 2, 4]
    site.pods.finish()
    assert site.pods.numbers() == [0, 2, 4]


async def test_a_worker_that_waits_for_a_node_leaves_with_its_pod(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its name KubeRay would delete a pod with a worker. Lists of pods come in pages."""
    monkeypatch.setattr(raycluster_workers, "PAGE_PODS", 2)
    site.pods.waiting = {5}
    workers = site.workers()
    await workers.resize(await workers.count(), 6)
    assert (await workers.count()).last_id == "decode-4"
    await site.shrink()
    assert site.pods.named() == [pod_name(5)] and site.pods.numbers() == [0, 1, 2, 3, 4]
    assert site.server.rayclusters.listed == 2 * 3  # of the dry run, and of the change


async def test_a_pod_that_kuberay_could_not_make_is_given_up(site: Site) -> None:
    """A quota refuses it. There is none to name."""
    site.pods.states = [each for each in site.pods.states if each.number != ON_PODS[-1]]
    del site.hosts["decode-3"]
    await site.shrink()
    assert site.pods.named() == [] and site.pods.numbers() == [0, 2, 3, 4]


async def test_kuberay_has_to_be_done_before_a_pod_is_named(site: Site) -> None:
    site.pods.states += [site.pods.states[0]]  # six pods of five
    with pytest.raises(BatonError, match="has 6 pods, and 5 are asked for: KubeRay has not"):
        await site.shrink()
    assert site.server.rayclusters.patches == []


async def test_a_number_that_a_user_sets_is_followed(site: Site) -> None:
    path = "/spec/workerGroupSpecs/1/replicas"
    site.server.rayclusters.patch(NAME, [{"op": "add", "path": path, "value": 7}])
    assert (await site.workers().count()).asked == 7 and site.number.size == FleetSize(1, 6)


async def test_the_driver_gets_a_number_that_redis_has_lost(site: Site) -> None:
    """Its own command line may be older."""
    workers = site.workers()
    await workers.count()
    site.number.size = None
    await workers.count()
    assert site.number.size == FleetSize(1, 4)


async def test_a_first_reading_waits_for_the_driver_s_number(site: Site) -> None:
    """How many workers begin as prefill workers is known from there alone."""
    site.number.size = None
    workers = site.workers()
    with pytest.raises(Unavailable, match="has not written yet how many workers begin as prefill"):
        await workers.count()
    assert site.number.size is None
    site.number.size = FleetSize(2, 1)  # of its command line
    assert (await workers.count()).last_id == "decode-2"
    assert site.number.size == FleetSize(2, 3)


async def test_a_foreign_number_is_replaced_by_the_rayclusters(site: Site) -> None:
    workers = site.workers()
    await workers.count()
    site.number.foreign = b"a text of another process"
    with capture_logs() as logs:
        assert (await workers.count()).asked == 5
    assert site.number.foreign == b"" and site.number.size == FleetSize(1, 4)
    (event,) = [each for each in logs if each["event"] == "fleet number restored"]
    assert event["decode"] == 4 and "not signed" in event["reason"] and event["remedy"]
    site.number.foreign = b"another text"
    with pytest.raises(Unavailable, match="not signed"):  # it knows no number of the driver's
        await site.workers().count()
    assert site.number.foreign == b"another text"


async def test_the_prefill_workers_of_a_driver_stay_its_own(site: Site) -> None:
    """A release with another number of them is being upgraded."""
    site.number.size = FleetSize(3, 4)
    assert (await site.workers().count()).asked == 5
    assert site.number.size == FleetSize(3, 2)
    site.number.size = FleetSize(5, 4)
    with pytest.raises(BatonError, match="has 5 pods, and 5 workers .* set minReplicas to 6"):
        await site.workers().count()


async def test_what_has_changed_since_it_was_seen_is_not_overwritten(site: Site) -> None:
    workers, other = site.workers(), site.workers()
    seen = await workers.count()
    await other.resize(await other.count(), 6)
    for call in (workers.check, workers.resize):
        with pytest.raises(BatonError, match="422: the server rejected the patch"):
            await call(seen, 7)
    await workers.count()
    with pytest.raises(BatonError, match="read again since the decision"):
        await workers.resize(seen, 7)
    assert site.pods.numbers() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("prefill", "workers", "least"), [(1, 9, 2), (1, 1, 2), (3, 3, 4)])
async def test_bounds_of_the_group_are_named(
    site: Site, prefill: int, workers: int, least: int
) -> None:
    """KubeRay would take the bound instead, and say nothing."""
    site.number.size = FleetSize(prefill, 5 - prefill)
    pool = site.workers()
    words = f"group worker, whose minReplicas is 2 and maxReplicas 8, and {least} workers are the"
    with pytest.raises(BatonError, match=words):
        await pool.check(await pool.count(), workers)


async def test_an_account_may_touch_one_raycluster_alone(site: Site) -> None:
    with pytest.raises(BatonError, match="403: controller may not get the RayCluster another"):
        await site.workers("another").count()
    site.server.roles["controller"] = RULES[:1]
    with pytest.raises(BatonError, match="403: controller may not list pods"):
        await site.shrink()
    assert site.server.rayclusters.patches == []


async def test_another_answer_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BatonError, match="no group code, it has code-worker, worker"):
        await site.workers(group="code").count()
    monkeypatch.setattr(type(site.server.rayclusters), "answer", lambda *_, **__: (200, {"a": 1}))
    with pytest.raises(BatonError, match="answered with no RayCluster"):
        await site.workers().count()


class SizedScene(RoleLoopScene):
    """A leader whose five workers run in pods. Each worker that leaves a pod is gone with it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.drained: list[str] = []
        self.killed = False  # amid the drain
        super().__init__()
        roles = self.reader.scripted.roles
        names = ["prefill-0", *(f"decode-{n}" for n in range(4))]
        self.reader.scripted = ScriptedFleet(dict(zip(names, roles.values(), strict=True)))

    def size_loop(self) -> SizeLoop:
        return SizeLoop(
            self.site.workers(),
            SizeController(BOUNDS),
            self.drain,
            lambda: self.reader.scripted.now_s,
            start_s=400.0,
        )

    async def drain(self, boot_id: str) -> None:
        worker = boot_id.partition(".")[0]
        self.drained.append(worker)
        self.reader.scripted.states[worker] = "draining"
        self.site.pods.touch()  # its pod is ready no more
        if self.killed:
            raise asyncio.CancelledError

    def started_again(self) -> None:
        """Let the supervisors of drained workers have started them again."""
        self.reader.scripted.states.clear()

    async def calm(self, seconds: int) -> None:
        """Let a load pass that three workers would serve."""
        self.reader.scripted.rate = 1.0
        await self.pass_by(seconds)


async def test_a_worker_drains_before_its_pod_is_named(site: Site) -> None:
    scene = SizedScene(site)
    await scene.calm(50)
    assert scene.drained == ["decode-3"] and site.pods.named() == [LAST_POD]
    assert site.pods.numbers() == [0, 2, 3, 4] and site.number.size == FleetSize(1, 3)


async def test_pods_without_a_worker_say_why(site: Site) -> None:
    """Pods have no worker's name: each missing worker gets the words of one of them."""
    site.pods.waiting = {5}
    site.pods.states = [each for each in site.pods.states if each.number != 0]
    workers = site.workers()
    await workers.resize(await workers.count(), 7)
    site.pods.states = [each for each in site.pods.states if each.number != 6]  # a quota
    assert site.pods.numbers() == [1, 2, 3, 4, 5, 7]
    await workers.count()
    missing = ["decode-4", "decode-5", "decode-6"]
    found = await workers.problems(missing)
    assert [found[name].reason for name in missing[:2]] == ["no_node", "no_pod"]
    assert found["decode-4"].detail == f"pod {pod_name(5)}: no node has room"
    assert found["decode-5"].detail == "the group worker has 6 of 7 pods"
    assert "decode-6" not in found, "its pod is there, and starts"
    assert await workers.problems(["prefill-0"]) == {}
    red = await workers.problems(["decode-1", *missing])
    assert "decode-1" not in red and red.keys() == found.keys(), "it is registered, and has a pod"


class InterruptedNumber(ScriptedNumber):
    """A number at whose first reading something happens, `before` it or after."""

    def __init__(
        self, size: FleetSize, act: Callable[[], Awaitable[None]], *, before: bool
    ) -> None:
        super().__init__(size)
        self._acts, self._before = [act], before

    async def read(self) -> tuple[FleetSize, bytes] | None:
        acts, self._acts = self._acts, []
        for act in acts if self._before else ():
            await act()
        found = await super().read()
        for act in () if self._before else acts:
            await act()
        return found


@pytest.mark.parametrize("before", [True, False])
async def test_a_late_leader_overwrites_no_copy(site: Site, before: bool) -> None:
    """Its successor asks for more, and copies that, between its two readings."""

    async def succeed() -> None:
        successor = site.workers()
        await successor.resize(await successor.count(), 7)
        await successor.count()
        assert site.number.size == FleetSize(1, 6)

    site.number = InterruptedNumber(FleetSize(1, 4), succeed, before=before)
    with contextlib.suppress(BatonError):  # it may see that the number has changed
        await site.workers().count()
    assert site.number.size == FleetSize(1, 6)


async def test_where_the_patch_would_be_refused_no_worker_drains(site: Site) -> None:
    site.server.roles["controller"] = [{**RULES[0], "verbs": ["get"]}, RULES[1]]
    scene = SizedScene(site)
    await scene.calm(50)
    assert scene.drained == [] and site.server.refused
    assert {each.split()[1] for each in site.server.refused} == {"patch"}


async def test_a_patch_that_is_refused_after_the_drain_is_asked_again(site: Site) -> None:
    """The worker's supervisor starts it again in its pod."""
    scene = SizedScene(site)
    site.server.rayclusters.refuses = 503
    await scene.calm(50)
    assert scene.drained == ["decode-3"] and site.pods.numbers() == [0, 1, 2, 3, 4]
    assert site.number.size == FleetSize(1, 4)
    site.server.rayclusters.refuses = 0
    scene.started_again()
    await scene.calm(int(FAILED_S))
    assert scene.drained == ["decode-3"] * 2 and site.pods.named() == [LAST_POD]
    assert site.pods.numbers() == [0, 2, 3, 4] and site.number.size == FleetSize(1, 3)


async def test_a_patch_whose_answer_got_lost_is_not_repeated(site: Site) -> None:
    scene = SizedScene(site)
    site.server.rayclusters.refuses, site.server.rayclusters.unanswered = 503, True
    await scene.calm(50)
    assert len(site.server.rayclusters.patches) == 1
    assert site.pods.numbers() == [0, 2, 3, 4] and site.number.size == FleetSize(1, 3)


async def test_a_controller_killed_before_the_patch_leaves_the_number(site: Site) -> None:
    scene = SizedScene(site)
    scene.killed = True
    with pytest.raises(asyncio.CancelledError):
        await scene.calm(50)
    assert scene.drained == ["decode-3"] and site.server.rayclusters.patches == []
    scene.killed = False
    scene.started_again()
    scene.leadership.term += 1
    scene.start()  # its memory says that the number changed: the next step waits as for one
    await scene.calm(int(SHRINK_GAP_S) - 5)
    assert site.pods.numbers() == [0, 1, 2, 3, 4] and site.number.size == FleetSize(1, 4)
    await scene.calm(30)
    assert scene.drained == ["decode-3"] * 2 and site.pods.named() == [LAST_POD]


async def test_a_successor_completes_what_is_done_by_half(site: Site) -> None:
    """Killed after the PATCH: the driver does not know of it yet."""
    await site.shrink()
    assert site.pods.numbers() == [0, 2, 3, 4] and site.number.size == FleetSize(1, 4)
    assert (await site.workers().count()).last_id == "decode-2"
    assert site.number.size == FleetSize(1, 3)


async def test_a_redis_that_is_away_changes_no_pod(site: Site) -> None:
    site.number.fault = Unavailable("the registry's server does not answer")
    scene = SizedScene(site)
    await scene.calm(50)
    assert scene.drained == [] and site.server.rayclusters.patches == []
