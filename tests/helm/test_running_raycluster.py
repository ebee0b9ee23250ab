"""The commands of a RayCluster's groups run in pods: `ray start` as KubeRay writes it, `baton
fleet` beside the head, workers on the groups' pods, and an upgrade by `baton release replace`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.chart import Release, Values, example, merged, render
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.network import network_unavailable
from tests.support.pods.programs import Programs

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
RELEASE: Values = {"orchestrator": "kuberay", "router": {"leaveSeconds": 2}}
CHANGED: Values = {"workers": {"settings": {"step.max_sequences": 24}}}
HANDOFFS = re.compile(r"handoffs: [1-9]\d* of 5 prompts")
RAYCLUSTER = "chat-baton-ray"
REPLACED_S = 500.0
# What a call in each way gets from an address: bytes of HTTP/2, or a refusal.
CALL = """
import os, socket, ssl, sys
PREFACE = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes(3) + bytes([4, 0, 0, 0, 0, 0])
def call(way):
    host, port = sys.argv[1:3]
    link = socket.create_connection((host, int(port)), 5)
    if way != "plain":
        context = ssl.create_default_context(cafile=os.environ["RAY_TLS_CA_CERT"])
        context.set_alpn_protocols(["h2"])
        if way == "own":
            own = os.environ["RAY_TLS_SERVER_CERT"], os.environ["RAY_TLS_SERVER_KEY"]
            context.load_cert_chain(*own)
        link = context.wrap_socket(link, server_hostname=host)
    link.sendall(PREFACE)
    got = link.recv(9)
    return "answered" if got[3:4] == bytes([4]) else "refused"  # a frame of settings
for way in ("plain", "unknown", "own"):
    try:
        print(way, call(way))
    except OSError as error:
        print(way, "unreached" if isinstance(error, TimeoutError) else "refused")
"""
# The ports of drivers and actors at which a pod listens.
LISTENING = """
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
ports = {int(each[1].split(":")[1], 16) for each in lines if each[3] == "0A"}
print(*[port for port in ports if 10002 <= port <= 10999])
"""
ANSWERED = "plain refused\nunknown refused\nown answered\n"
UNREACHED = "plain unreached\nunknown unreached\nown unreached\n"


@dataclass(slots=True)
class Site:
    cluster: PodCluster
    programs: Programs
    release: Release
    values: Values

    def names(self, component: str) -> list[str]:
        return [each.name for each in self.cluster.pods(component)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    values = merged(example("cpu-demo"), RELEASE)
    release = render(values)
    with ExitStack() as stack:
        cluster = stack.enter_context(PodCluster(folder, local_images(folder)))
        programs = Programs(cluster, folder / "user")
        stack.callback(programs.close)
        cluster.apply(release, "pre-install")
        cluster.settle(within_s=400)
        yield Site(cluster, programs, release, values)


def test_ray_places_a_worker_on_each_pod_and_kv_moves(site: Site) -> None:
    """The release's own test asks for a chat and streams, and fails unless KV moved."""
    assert HANDOFFS.search(site.cluster.run_test(site.release))
    for component in ("prefill", "decode"):  # `baton fleet` is started again until Ray is there
        (pod,) = site.cluster.pods(component)
        assert pod.restarts == 0


def test_rays_state_is_on_its_redis_by_tls(site: Site) -> None:
    (redis,), (head,) = site.cluster.pods("ray-redis"), site.cluster.pods("ray-head")
    counted = redis.container("redis").run(["valkey-cli", "-s", "/data/redis.sock", "dbsize"], 20)
    assert int(counted.stdout) > 0, counted.stderr
    seen = head.container("ray-head").run(["sh", "-c", "echo $RAY_REDIS_ADDRESS"], 20)
    assert seen.stdout == "rediss://chat-baton-ray-redis.llm:6379\n"
    assert "port 0" in redis.container("redis").run(["cat", "/data/redis.conf"], 20).stdout


def test_ray_answers_holders_of_a_certificate_by_tls(site: Site) -> None:
    """GCS, raylet, object manager and a driver, called from another pod of Ray."""
    (head,), (worker,) = site.cluster.pods("ray-head"), site.cluster.pods("decode")
    own = worker.container("worker")
    first = own.run(["sh", "-c", "ray status --address=$RAY_ADDRESS"], 60)
    assert "Active:" in first.stdout, first.stderr
    driver = head.container("fleet").run([sys.executable, "-c", LISTENING], 20).stdout.split()
    actor = own.run([sys.executable, "-c", LISTENING], 20).stdout.split()
    assert driver and actor
    for port in actor:
        called = own.run([sys.executable, "-c", CALL, worker.address, port], 60)
        assert called.stdout == ANSWERED, (port, called.stdout, called.stderr)
    for port in ("6379", "6380", "6381", *driver):
        called = own.run([sys.executable, "-c", CALL, head.address, port], 60)
        assert called.stdout == ANSWERED, (port, called.stdout, called.stderr)
    for port in ("6382", "6384", "6385"):  # HTTP of Ray's agents
        called = own.run([sys.executable, "-c", CALL, head.address, port], 60)
        assert called.stdout == UNREACHED, (port, called.stdout, called.stderr)


def test_pods_of_an_upgraded_raycluster_stay_until_replaced(site: Site) -> None:
    before = {name: site.names(name) for name in ("ray-head", "prefill", "decode")}
    site.release = render(merged(site.values, CHANGED))
    site.cluster.apply(site.release, "pre-upgrade")
    site.cluster.settle()
    assert before == {name: site.names(name) for name in before}
    done = subprocess.run(
        [Path(sys.executable).with_name("baton"), "release", "replace", RAYCLUSTER],
        env={**os.environ, "PATH": f"{site.programs.folder}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=REPLACED_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr + site.cluster.logs()
    assert "3 pods replaced" in done.stdout
    for name, old in before.items():
        assert len(site.names(name)) == 1 and not {*old} & {*site.names(name)}
    named = [
        group["scaleStrategy"]["workersToDelete"]
        for group in site.cluster.api.rayclusters.objects[RAYCLUSTER]["spec"]["workerGroupSpecs"]
    ]
    assert named == [before["prefill"], before["decode"]]
    assert HANDOFFS.search(site.cluster.run_test(site.release))


def test_no_container_outlived_its_grace_period(site: Site) -> None:
    site.cluster.check()
    assert site.cluster.killed_late == []
