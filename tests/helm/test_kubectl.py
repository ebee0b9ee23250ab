"""The runner's `kubectl` and controllers, on pods of shell scripts: restarts, scales, a job, and
forwarded ports. Tests follow each other on one cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from tests.support.chart import Document, Release
from tests.support.machine_speed import slowness
from tests.support.pods.cluster import PodCluster
from tests.support.pods.container import Image, base_mounts
from tests.support.pods.network import network_unavailable
from tests.support.pods.programs import Programs
from tests.support.pods.user import User, listening
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(240),
]
IDLE = "trap 'exit 0' TERM; while :; do sleep 0.1; done"
SERVER = f"{sys.executable} -IS -m http.server --bind 127.0.0.1 8123"
SERVE = f"trap 'exit 0' TERM; cd /kept; {SERVER} & wait"
TRY_TWICE = "test -e /kept/tried && echo fetched && exit 0; touch /kept/tried; exit 1"


def template(app: str, script: str, restarts: str = "Always") -> Document:
    return {
        "metadata": {"labels": {"app": app}},
        "spec": {
            "restartPolicy": restarts,
            "terminationGracePeriodSeconds": 5,
            "securityContext": {"runAsUser": 10001, "runAsGroup": 10001},
            "volumes": [{"name": "kept", "emptyDir": {}}],
            "containers": [{
                "name": "main", "image": "any", "command": ["sh", "-c", script],
                "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
            }],
        },
    }  # fmt: skip


def wanted(script: str) -> Release:
    """Return a set whose pods run a script, a server on its pod's loopback, and a job."""
    pools = {"replicas": 2, "template": template("pool", f"echo began; {script}")}
    web = {"replicas": 1, "template": template("web", SERVE)}
    fetch = {"template": template("fetch", TRY_TWICE, "OnFailure")}
    kinds = {"StatefulSet": ("pool", pools), "Deployment": ("web", web), "Job": ("fetch", fetch)}
    documents = [
        {"kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, (name, spec) in kinds.items()
    ]
    return Release(documents, "")


@dataclass(slots=True)
class Site:
    cluster: PodCluster
    user: User

    def addresses(self) -> dict[str, str]:
        return {each.name: each.address for each in self.cluster.owned_by("pool")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        image = Image(base_mounts())
        cluster = stack.enter_context(PodCluster(folder, lambda name: image))
        programs = Programs(cluster, folder / "user")
        stack.callback(programs.close)
        cluster.apply(wanted(IDLE), "pre-install")
        cluster.settle()
        yield Site(cluster, User(programs, cluster.client()))


def test_a_restart_replaces_pods_and_a_scale_changes_them(site: Site) -> None:
    before = site.addresses()
    site.user.typed("kubectl rollout restart statefulset/pool")
    site.user.typed("kubectl rollout status statefulset/pool")
    after = site.addresses()
    assert after.keys() == before.keys() and {*after.values()}.isdisjoint(before.values())
    site.user.typed("kubectl scale deployment/web --replicas=0")
    site.user.typed("kubectl rollout status deployment/web")
    assert site.cluster.owned_by("web") == []
    site.user.typed("kubectl scale deployment/web --replicas=1")
    site.user.typed("kubectl rollout status deployment/web")
    assert "pool   2/2" in site.user.typed("kubectl get statefulset")


def test_a_job_runs_until_it_succeeds(site: Site) -> None:
    wait_until(lambda: "Complete" in site.user.typed("kubectl get jobs"), every_s=0.2)
    assert site.user.typed("kubectl logs job/fetch") == "fetched\n"
    assert "fetch" in site.user.typed("kubectl get events")


def test_a_forwarded_port_is_one_of_the_pods_loopback(site: Site) -> None:
    (web,) = site.cluster.owned_by("web")
    asked = "exec 3<>/dev/tcp/127.0.0.1/8123; printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
    script = (
        f"kubectl port-forward {web.name} 8123 > /dev/null &\n{listening(8123)}\n{asked}\nkill %1"
    )
    assert "200 OK" in site.user.typed(script)


def test_a_script_that_fails_ends_what_it_forwards(site: Site) -> None:
    """Else it would last until TYPED_S are over, and its text would not be seen."""
    (web,) = site.cluster.owned_by("web")
    began_s = time.monotonic()
    script = f"kubectl port-forward {web.name} 8123 > /dev/null &\necho seen; false"
    assert "seen" in site.user.typed(script, code=1)
    assert "seen" in site.user.typed(f"sleep 0 &\necho seen\n{listening(8124)}", code=1)
    assert time.monotonic() - began_s < 20 * slowness()


@pytest.mark.parametrize(
    "command",
    [
        "apply -f x",
        "create secret generic own",
        "get nodes",
        "get pods -o yaml",
        "get raycluster",
        "rollout undo deployment/web",
        "scale statefulset/pool --replicas=1",
    ],
)
def test_a_command_that_is_not_known_is_refused(site: Site, command: str) -> None:
    said = site.user.typed(f"kubectl {command}", code=1)
    assert "not known" in said or "invalid choice" in said


def test_no_container_outlived_its_grace_period(site: Site) -> None:
    site.cluster.check()
    assert site.cluster.killed_late == []
