"""The token and the authority of a release are replaced under a steady load, as the documents say:
no request fails or gets a wrong token, and then the old ones are refused. Tests follow each other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.deploy.host.stored_authority import Request, create_authority, issue
from tests.support.chart import Values
from tests.support.pod_commands import IN_PODS, TOKEN_STEPS
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.load import completed_handoffs
from tests.support.pods.loaded_release import LoadedRelease, loaded_release
from tests.support.pods.network import network_unavailable
from tests.support.pods.programs import Programs
from tests.support.pods.user import User
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
WORKER = "chat-baton-worker.llm"
REDIS = "chat-baton-redis.llm"
HOSTS: dict[str, tuple[str, ...]] = {  # at which each component's certificate says it is called
    "router": (),
    "prefill": (WORKER,),
    "decode": (WORKER,),
    "redis": (REDIS,),
}
RELEASE: Values = {
    "tls": {"mode": "existing", "existingSecrets": {name: f"own-{name}" for name in HOSTS}}
}
MEMBERS = ("statefulset/chat-baton-prefill", "statefulset/chat-baton-decode",
           "deployment/chat-baton-router")  # fmt: skip
ACCEPTED = "UNAVAILABLE: the order names boot"  # a worker answers so to token and certificate
FILES = {"cert": "tls.crt", "key": "tls.key", "ca-cert": "ca.crt"}  # as Redis names them
RESTARTED_S = 120.0
CALL_S = 60.0
CALL = """
import asyncio, json, os, sys, tempfile
from baton.runtime import tls_version  # before grpc
import grpc
from baton.proto import control_pb2, control_pb2_grpc
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.grpc_links import credentials, open_channel
from baton.runtime.tls import Tls

async def call(address, token, name, files):
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, content in enumerate(files):
            paths.append(os.path.join(folder, str(number)))
            with open(os.open(paths[-1], os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
                file.write(content)
        async with open_channel(address, Tls(SecurityConfig("on", *paths, name))) as channel:
            stub = control_pb2_grpc.WorkerControlStub(channel)
            boot = control_pb2.WorkerBoot(worker_id="stranger", boot_id=bytes(16))
            request = control_pb2.DrainRequest(worker=boot)
            try:
                await stub.Drain(request, metadata=credentials(token), timeout=20)
                print("done")
            except grpc.aio.AioRpcError as error:
                print(f"{error.code().name}: {error.details()}")

asyncio.run(call(*json.loads(sys.argv[1])))
"""
PING = """
import json, socket, ssl, sys, tempfile
host, (authority, chain, key) = json.loads(sys.argv[1])
context = ssl.create_default_context(cadata=authority)
with tempfile.NamedTemporaryFile("w") as pair:
    pair.write(chain + key)
    pair.flush()
    context.load_cert_chain(pair.name)
with socket.create_connection((host, 6379), 10) as plain:
    try:
        with context.wrap_socket(plain, server_hostname=host) as call:
            call.sendall(b"PING\\r\\n")
            print(call.recv(64))
    except (ssl.SSLError, ConnectionResetError) as error:
        print("refused:", error)
"""
Files = dict[str, bytes]


@dataclass(slots=True)
class Site:
    release: LoadedRelease
    user: User

    def restart_members(self) -> None:
        for each in MEMBERS:
            for step in ("restart", "status"):
                self.user.typed(f"{self.user.command(f'kubectl rollout {step}')} {each}")

    def put(self, component: str, **change: bytes) -> None:
        """Change keys of a component's Secret, whose names have `_` for the point."""
        api, name = self.release.cluster.api, f"own-{component}"
        data = {key.replace("_", "."): value for key, value in change.items()}
        api.put(name, {**api.data(name), **data})

    def ordered(self, token: str, files: Files) -> str:
        """Send a worker an order that is for another one, from a router's pod, with this token and
        certificate. Return the status with its message."""
        worker = self.release.cluster.pod("chat-baton-decode-0").address
        return self._run(CALL, [f"{worker}:9000", token, WORKER, texts(files)])

    def redis_answers(self, files: Files) -> bool:
        """Return whether Redis and a client with these files trust each other."""
        said = self._run(PING, [REDIS, texts(files)])
        assert "NOAUTH" in said or said.startswith("refused"), said
        return "NOAUTH" in said

    def reload_redis(self) -> None:
        """Let Redis read its files now, as its container does once a minute
        (test_running_redis.py)."""
        words = [f"tls-{name}-file /etc/baton/tls/{file}" for name, file in FILES.items()]
        call = "valkey-cli -s /data/redis.sock -e config set"
        self.user.typed(f"kubectl exec chat-baton-redis-0 -- {call} {' '.join(words)}")

    def handoffs(self) -> dict[str, int]:
        return {each.name: completed_handoffs(each) for each in self.release.cluster.pods("decode")}

    def restart_in_place(self, name: str) -> None:
        """Drain a worker, whose container then starts again at the same address."""
        pod = self.release.cluster.pod(name)
        before = pod.restarts
        self.user.typed(f"kubectl exec {name} -- baton drain {name}")
        wait_until(lambda: pod.restarts > before and pod.ready, RESTARTED_S, every_s=0.2)
        self.release.wait_for_links(2)

    def _run(self, program: str, given: object) -> str:
        """Run a program in a router's pod, and return what it prints."""
        router = self.release.cluster.pods("router")[0].container("router")
        words = [sys.executable, "-P", "-c", program, json.dumps(given)]
        done = router.run(words, CALL_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def texts(files: Files) -> list[str]:
    return [files[name].decode() for name in ("ca.crt", "tls.crt", "tls.key")]


def issued(folder: Path) -> dict[str, Files]:
    """Make an authority, and return the files of each component."""
    create_authority(folder / "ca", 30)
    found = {}
    for name, hosts in HOSTS.items():
        made = issue(folder / "ca", folder / name, Request(name, hosts, 30))
        parts = {"ca.crt": made.authority, "tls.crt": made.certificate, "tls.key": made.key}
        found[name] = {part: path.read_bytes() for part, path in parts.items()}
    return found


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    return issued(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, old: dict[str, Files]) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        cluster = stack.enter_context(PodCluster(folder, local_images(folder)))
        programs = Programs(cluster, folder / "user")
        stack.callback(programs.close)
        for name, files in old.items():
            cluster.api.put(f"own-{name}", files)
        release = loaded_release(cluster, tmp_path_factory.mktemp("right"), RELEASE)
        yield Site(release, User(programs, cluster.client()))


def test_a_replaced_token_fails_no_request(site: Site, old: dict[str, Files]) -> None:
    token = site.release.cluster.api.data("chat-baton-secrets")["token"].decode()
    another = "another-token-0123456789abcdef0123456789"
    assert ACCEPTED in site.ordered(token, old["router"])
    assert "UNAUTHENTICATED" in site.ordered(another, old["router"])
    with site.release.load():
        for patch in TOKEN_STEPS:
            before = site.release.addresses("router", "prefill", "decode")
            site.user.documented(patch, OLD=token, NEW=another)
            site.restart_members()
            site.release.wait_for_links(2)
            assert before.isdisjoint(site.release.addresses("router", "prefill", "decode"))
    assert ACCEPTED in site.ordered(another, old["router"])
    assert "UNAUTHENTICATED" in site.ordered(token, old["router"])


def test_a_replaced_authority_fails_no_request(
    site: Site, old: dict[str, Files], tmp_path: Path
) -> None:
    """As docs/security.md says: both authorities, then the new certificates, then the new authority
    alone. No pod is replaced; then workers restart, so that all links are new."""
    token = site.release.cluster.api.data("chat-baton-secrets")["token"].decode()
    new = issued(tmp_path)
    both = old["router"]["ca.crt"] + new["router"]["ca.crt"]
    before = site.release.addresses("router", "prefill", "decode", "redis")
    with site.release.load():
        for name in HOSTS:
            site.put(name, ca_crt=both)
        site.reload_redis()
        assert site.redis_answers({**new["router"], "ca.crt": both})
        for name, files in new.items():
            site.put(name, tls_crt=files["tls.crt"], tls_key=files["tls.key"])
        site.reload_redis()
        assert site.redis_answers(new["router"])
        for name, files in new.items():
            site.put(name, ca_crt=files["ca.crt"])
        site.reload_redis()
        assert not site.redis_answers({**old["router"], "ca.crt": both})
        assert ACCEPTED in site.ordered(token, new["router"])
        refused = site.ordered(token, {**old["router"], "ca.crt": both})
        assert refused.startswith("UNAVAILABLE") and ACCEPTED not in refused
        for name in ("chat-baton-decode-0", "chat-baton-prefill-0", "chat-baton-decode-1"):
            site.restart_in_place(name)
        moved = site.handoffs()
        wait_until(lambda: all(count > moved[name] for name, count in site.handoffs().items()))
    assert before == site.release.addresses("router", "prefill", "decode", "redis")


def test_each_command_of_this_file_was_typed(site: Site) -> None:
    assert {*site.user.used} == {*IN_PODS[Path(__file__).name]}


def test_no_container_outlived_its_grace_period(site: Site) -> None:
    site.release.cluster.check()
    assert site.release.cluster.killed_late == []
