"""A release that runs: the pods of rendered manifests in namespaces, from a newcomer's install to
an upgrade. Tests follow each other on one release."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.chart import Values, example, merged, render
from tests.support.client_certificates import ClientCertificates
from tests.support.newcomer import ask_as_noted, documented, first_streamed_token_s
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.network import network_unavailable
from tests.support.pods.programs import Programs
from tests.support.pods.user import User, listening
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
SETTINGS = {"worker.dtype": "float32", "pool.blocks": 640}
FLEET: Values = {  # what the release becomes by an upgrade
    "model": {"name": "small"},
    "router": {"replicas": 2, "leaveSeconds": 2},
    "workers": {"settings": SETTINGS},
    "decode": {"replicas": 2},
}


@dataclass(slots=True)
class Site:
    """A user and the cluster."""

    cluster: PodCluster
    user: User
    values: Values

    def upgrade(self) -> str:
        """Upgrade the release to the values; return what `helm` prints."""
        path = self.user.programs.folder / "values.yaml"
        path.write_text(yaml.safe_dump(self.values))
        return self.user.typed(f"helm upgrade chat helm/baton -f {path}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        cluster = stack.enter_context(PodCluster(folder, local_images(folder)))
        programs = Programs(cluster, folder / "user")
        stack.callback(programs.close)
        values = merged(example("cpu-demo"), FLEET)
        yield Site(cluster, User(programs, cluster.client()), values)


def test_a_newcomer_reaches_a_first_streamed_token(site: Site) -> None:
    """What docs/kubernetes.md and the notes say, typed line by line. Images are there already."""
    took_s = first_streamed_token_s(site.user, site.cluster.logs)
    print(f"first streamed token {took_s:.1f} s after helm install")


def test_the_hook_has_its_rights_and_a_pod_has_none(site: Site) -> None:
    roles = ("router", "prefill", "decode", "redis")
    names = {"authority-key", "secrets", *(f"{role}-tls" for role in roles)}
    assert set(site.cluster.api.secrets) == {f"chat-baton-{name}" for name in names}
    assert site.cluster.api.refused == []
    (router,) = site.cluster.pods("router")
    script = "id -u; touch /usr/x /x 2>&1; grep CapBnd /proc/1/status; ls /etc/baton/tls"
    seen = router.container("router").run(["sh", "-c", script], 20).stdout
    assert seen.startswith("10001\n") and seen.count("Read-only file system") == 2
    assert "CapBnd:\t0000000000000000" in seen and "tls.key" in seen


def test_helm_test_proves_that_kv_moved(site: Site) -> None:
    site.cluster.settle()
    said = site.user.typed(documented("helm test"))
    assert re.search(r"handoffs: [1-9]\d* of 5 prompts", said), said


def test_what_no_policy_admits_does_not_pass(site: Site) -> None:
    """A call that is admitted connects at once; any other one is dropped."""
    (prefill,), (router,) = site.cluster.pods("prefill"), site.cluster.pods("router")
    (redis,) = site.cluster.pods("redis")
    ways = [(prefill.address, 9000), (prefill.address, 9001), (redis.address, 6379),
            (router.address, 8000)]  # fmt: skip
    try_all = (
        "import socket, sys\n"
        f"for way in {ways!r}:\n"
        "    try:\n        socket.create_connection(way, 1).close()\n"
        "    except OSError as error: print(way[1], type(error).__name__)\n"
        "    else: print(way[1], 'open')\n"
    )
    program = [sys.executable, "-IS", "-c", try_all]
    stranger = {
        "metadata": {"labels": {"app": "stranger"}},
        "spec": {
            "restartPolicy": "Never",
            "securityContext": {"runAsUser": 10001, "runAsGroup": 10001},
            "containers": [{"name": "call", "image": "any", "command": program}],
        },
    }
    said = site.cluster.run_once("stranger", stranger)
    assert re.findall(r"^\d+ \w+", said, re.MULTILINE) == [
        "9000 TimeoutError", "9001 TimeoutError", "6379 TimeoutError", "8000 open",
    ]  # fmt: skip
    own = router.container("router").run(program, 30).stdout
    assert own.splitlines() == ["9000 open", "9001 TimeoutError", "6379 open", "8000 open"]


def test_redis_speaks_no_plain_text(site: Site) -> None:
    (redis,), (router,) = site.cluster.pods("redis"), site.cluster.pods("router")
    asked = (
        "import socket\n"
        f"with socket.create_connection({(redis.address, 6379)!r}, 5) as call:\n"
        "    call.sendall(b'PING\\r\\n')\n"
        "    try:\n        print(call.recv(64))\n"
        "    except ConnectionResetError:\n        print(b'')\n"
    )
    said = router.container("router").run([sys.executable, "-IS", "-c", asked], 30)
    assert said.stdout.startswith("b'") and "NOAUTH" not in said.stdout, said.stderr
    seen = router.container("router").run(["sh", "-c", "echo $BATON_REGISTRY__LOCATION"], 20)
    assert seen.stdout == "rediss://chat-baton-redis.llm:6379/0\n"


def test_a_drained_worker_is_started_again(site: Site) -> None:
    def restarts() -> int:
        return site.cluster.pod("chat-baton-prefill-0").restarts

    before = restarts()
    site.user.typed("kubectl exec chat-baton-prefill-0 -- baton drain chat-baton-prefill-0")
    wait_until(lambda: restarts() > before, every_s=0.2, show=site.cluster.logs)
    site.cluster.settle()


def test_a_deleted_pod_drains_and_comes_again(site: Site) -> None:
    before = site.cluster.pod("chat-baton-prefill-0")
    assert len(site.user.typed("kubectl logs chat-baton-prefill-0").splitlines()) > 1
    site.user.typed("kubectl delete pod chat-baton-prefill-0")
    site.cluster.settle()
    assert "drain started" in before.logs()
    assert site.cluster.pod("chat-baton-prefill-0").address != before.address


def test_checks_of_rdma_say_that_there_is_none(site: Site) -> None:
    """The pods have no RDMA device, and no other transport is taken for one."""
    found = {}
    for asked in ("ls", "grep", "env"):
        command = documented(f"kubectl exec POD -- {asked} ")
        process = site.user.shell(command.replace("POD", "chat-baton-decode-0"))
        found[asked], _ = process.communicate(timeout=200)
        assert (process.returncode == 0) == (asked == "grep"), found
    assert "No such file" in found["ls"] and "Max locked memory" in found["grep"]
    assert re.findall(r"^(\S+) +nixl transport ", found["env"], re.MULTILINE) == ["fail"], found


def test_an_upgrade_changes_every_pod(site: Site) -> None:
    before = {each.address for each in site.cluster.pods() if "redis" not in each.name}
    site.upgrade()
    site.cluster.settle()
    assert before.isdisjoint(each.address for each in site.cluster.pods())
    assert len(site.cluster.pods("router")) == len(site.cluster.pods("decode")) == 2


def test_clients_talk_by_tls_once_a_secret_is_named(site: Site, tmp_path: Path) -> None:
    """Documents and notes say how. No pod is replaced for another certificate."""
    files = ClientCertificates(tmp_path, host="chat-baton-router.llm")
    site.values = merged(site.values, {"router": {"tlsSecret": "web"}})
    create = documented("kubectl create secret tls ").replace("NAME", "web")
    assert f"\n  kubectl -n llm {create.removeprefix('kubectl ')}\n" in render(site.values).notes
    for word, name in (("CERTIFICATE_FILE", "tls.crt"), ("KEY_FILE", "tls.key")):
        create = create.replace(word, str(files.folder / name))
    site.user.typed(create)
    notes = site.upgrade().replace("router.crt", str(tmp_path / "router.crt"))
    site.cluster.settle()
    before = {each.address for each in site.cluster.pods("router")}
    forward = "kubectl port-forward service/chat-baton-router 8000 > /dev/null &"
    asked = [forward, listening(8000), documented("curl -k https"), "kill %1"]
    assert '"decode":2' in site.user.typed("\n".join(asked)).replace(" ", "")
    ask_as_noted(site.user, notes, site.cluster.logs)
    shown = (tmp_path / "router.crt").read_bytes()
    files.replace()
    names = ("tls.crt", "tls.key")
    site.cluster.api.put("web", {name: (files.folder / name).read_bytes() for name in names})
    ask_as_noted(site.user, notes, site.cluster.logs)  # trusts the new one alone
    assert (tmp_path / "router.crt").read_bytes() != shown
    assert re.search(r"handoffs: [1-9]\d* of 5 prompts", site.user.typed("helm test chat"))
    assert {each.address for each in site.cluster.pods("router")} == before
    assert all(each.restarts == 0 for each in site.cluster.pods("router"))


def of_chat(beginning: str) -> str:
    """Return the documented command for the release chat."""
    return documented(beginning).replace("RELEASE", "chat")


def restart_members(site: Site) -> None:
    """Delete the pods of all but Redis one by one, each once the last is ready."""
    for each in site.cluster.pods():
        if "redis" not in each.name:
            site.user.typed(f"kubectl delete pod {each.name}")
            site.cluster.settle()


def test_status_is_shown_by_a_command_in_a_routers_pod(site: Site) -> None:
    said = site.user.typed(of_chat("kubectl exec deployment/RELEASE-baton-router -- "))
    assert "is readable" in said and "warning" not in said
    for name in ("prefill-0", "decode-0", "decode-1"):
        assert re.search(rf"chat-baton-{name} .* ready ", said), said


def test_password_of_redis_is_replaced_as_documented(site: Site) -> None:
    """Both passwords are valid until the server's own pod is replaced."""
    status = of_chat("kubectl exec deployment/RELEASE-baton-router -- ")
    site.user.typed(of_chat("kubectl exec RELEASE-baton-redis-0 -- valkey-cli"))
    patch = 'kubectl patch secret RELEASE-baton-secrets -p \'{"stringData": {"redis-password"'
    site.user.typed(of_chat(patch))
    assert "is readable" in site.user.typed(status)  # with the old password
    restart_members(site)
    site.user.typed(of_chat("kubectl delete pod RELEASE-baton-redis-0"))
    site.cluster.settle()
    wait_until(lambda: "chat-baton-decode-1 " in site.user.typed(status), every_s=0.5)
    (router, _) = site.cluster.pods("router")
    seen = router.container("router").run(["sh", "-c", "echo $BATON_REGISTRY__PASSWORD"], 20)
    assert seen.stdout == "NEW\n"


def test_leaked_token_is_replaced_as_documented(site: Site) -> None:
    made = [name for name in site.cluster.api.secrets if name.startswith("chat-baton-")]
    before = {name: site.cluster.api.data(name) for name in made}
    site.user.typed(of_chat("kubectl delete secret RELEASE-baton-secrets"))
    site.user.typed(of_chat("kubectl delete secret RELEASE-baton-authority-key"))
    for name in before:
        if name.endswith("-tls"):
            site.user.typed(f"kubectl delete secret {name}")
    site.upgrade()
    after = {name: site.cluster.api.data(name) for name in before}
    assert all(after[name] != data for name, data in before.items())
    old = {each.address for each in site.cluster.pods()}
    site.user.typed(of_chat("kubectl delete pod -l app.kubernetes.io/instance="))
    site.cluster.settle()
    assert old.isdisjoint(each.address for each in site.cluster.pods())
    assert re.search(r"handoffs: [1-9]\d* of 5 prompts", site.user.typed("helm test chat"))
