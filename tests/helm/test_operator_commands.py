"""Types what docs/operations.md and docs/kubernetes.md tell an operator to type; it acts on the
pods of a release: where to look, forwarded ports, an ended worker, an upgrade that fails and is
rolled back, a model that a job downloads. Tests follow each other."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.chart import Values, example, merged
from tests.support.pod_commands import IN_PODS
from tests.support.pods.cluster import PodCluster
from tests.support.pods.images import local_images
from tests.support.pods.network import network_unavailable
from tests.support.pods.programs import Programs
from tests.support.pods.user import FOLDERS, User, listening
from tests.support.waiting import wait_until

LACKING = network_unavailable()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(LACKING), reason=f"no pods here: {LACKING}"),
    pytest.mark.timeout(900),
]
OPERATOR = "the-operators-key-0123456789"
RELEASE: Values = {
    "router": {"adminPort": 9402, "adminKeySecret": "operator"},
    "workers": {"settings": {"worker.dtype": "float32", "pool.blocks": 256}},
    "decode": {"replicas": 2},
}
BROKEN: Values = {"workers": {"settings": {"step.chunk_tokens": 17}}}  # no multiple of a block
DOWNLOADED: Values = {"model": {"embedded": False, "repository": "owner/tiny", "revision": "a1"}}
ASK_MANY = """for n in $(seq 30); do
    text=$(printf 'word %.0s' $(seq $((n * 9))))
    body="{{\\"model\\": \\"{model}\\", \\"prompt\\": \\"$text\\", \\"max_tokens\\": 24}}"
    curl -sSf -H 'Content-Type: application/json' -H 'Authorization: Bearer {key}' -d "$body" \\
        http://127.0.0.1:8000/v1/completions > /dev/null &
    test $((n % 6)) != 0 || wait $!
done
wait $!"""  # more than `baton advise` needs, and steps of many sizes
HUB = """#!/bin/sh
for word; do test "$last" = --local-dir && folder=$word; last=$word; done
sleep {delay_s}
cp -r /opt/baton/baton-tiny/. "$folder" && echo "downloaded into $folder"
"""
HUB_S = 8  # so that pods are seen to wait
READY_S = 120.0
STUCK_S = 25  # after which a rollout counts as stuck


@dataclass(slots=True)
class Site:
    cluster: PodCluster
    user: User
    values: Values
    folder: Path

    def upgraded(self, values: Values) -> str:
        path = self.folder / "values.yaml"
        path.write_text(yaml.safe_dump(merged(self.values, values)))
        return self.user.typed(
            f"{self.user.command('helm upgrade')} chat helm/baton -f {shlex.quote(str(path))}"
        )

    def forwarded(self, forward: str, *scripts: str) -> list[str]:
        """Forward a port, run scripts one after the other, and return what each prints."""
        port = forward.split()[-1]
        lines = [f"{forward} > /dev/null &", listening(port)]
        for each in scripts:
            lines += [each, "echo; echo ---"]
        return self.user.typed("\n".join([*lines, "kill %1"])).split("---\n")

    def rows(self, text: str) -> dict[str, list[str]]:
        """Return the words of each line of a table, by the first."""
        return {line.split()[0]: line.split() for line in text.splitlines()[1:]}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("pods")
    with ExitStack() as stack:
        cluster = stack.enter_context(PodCluster(folder, local_images(folder)))
        programs = Programs(cluster, folder / "user")
        stack.callback(programs.close)
        cluster.api.put("operator", {"admin-key": OPERATOR.encode()})
        path = f"{Path(sys.executable).parent}:{FOLDERS}"
        user = User(programs, cluster.client(), path)
        values = merged(example("cpu-demo"), RELEASE)
        made = Site(cluster, user, values, tmp_path_factory.mktemp("values"))
        (folder / "values.yaml").write_text(yaml.safe_dump(values))
        user.typed(f"helm install chat helm/baton -f {folder}/values.yaml")
        cluster.settle()
        yield made


def test_pods_and_their_state_are_shown(site: Site) -> None:
    user, pods = site.user, {each.name: each for each in site.cluster.pods()}
    assert site.rows(user.documented("kubectl get pods")).keys() == pods.keys()
    wide = site.rows(user.documented("kubectl get pods -l app.kubernetes.io/instance="))
    for name, words in wide.items():
        assert words[1:3] == ["1/1", "Running"] and pods[name].address in words
    sets = site.rows(user.documented("kubectl get statefulset"))
    assert sets["chat-baton-decode"][1] == "2/2"
    user.documented("kubectl rollout status statefulset/RELEASE-baton-decode")
    described = user.documented("kubectl describe pod RELEASE-baton-redis-0")
    assert "Status:  Running" in described and "Started container redis" in described
    assert "pod/chat-baton-prefill-0" in user.documented("kubectl get events")
    said = user.documented("kubectl logs -l app.kubernetes.io/component=router ")
    assert re.search(r"^\[pod/chat-baton-router-\d+/router\] \{", said, re.MULTILINE)


def test_forwarded_ports_answer_as_the_pages_say(site: Site, tmp_path: Path) -> None:
    user, (router,) = site.user, site.cluster.pods("router")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "baton-tiny", "prompt": "Once", "max_tokens": 4}))
    key = site.cluster.api.data("chat-baton-secrets")["api-keys"].decode()
    explain = user.command("baton explain FILE --url", FILE=str(body))
    ready, placed, _, _ = site.forwarded(
        user.command("kubectl port-forward POD 8000", POD=router.name),
        user.command("curl http://127.0.0.1:8000/readyz"),
        f"BATON_API_KEY={key} {explain}",
        ASK_MANY.format(model="baton-tiny", key=key),
    )
    assert '"decode":2' in ready.replace(" ", ""), ready
    assert "chat-baton-decode-" in placed, placed
    worker, _ = site.forwarded(
        user.command("kubectl port-forward POD 9001", POD="chat-baton-decode-1"),
        user.command("curl http://127.0.0.1:9001/readyz"),
    )
    assert "ready\n" in worker, worker
    slow, _ = site.forwarded(
        user.command("kubectl port-forward POD 9402", POD=router.name),
        f"BATON_API_KEY={OPERATOR} baton trace --slow --url http://127.0.0.1:9402",
    )
    assert len(slow.splitlines()) > 2, slow
    advice = user.documented("kubectl exec POD -- baton advise", POD=router.name)
    assert "ttft" in advice.lower(), advice


def test_an_ended_worker_shows_how_it_ended(site: Site) -> None:
    name = "chat-baton-decode-1"
    site.user.documented("kubectl exec POD -- baton drain POD", POD=name)
    wait_until(lambda: site.cluster.pod(name).restarts == 1, READY_S, every_s=0.2)
    described = site.user.documented("kubectl describe pod POD", POD=name)
    assert re.search(r"Last State: +Terminated\n +Exit Code: +0\n", described), described
    assert "drain started" in site.user.documented("kubectl logs POD --previous", POD=name)
    assert "drain started" not in site.user.documented("kubectl logs POD", POD=name)
    site.cluster.settle()


def test_a_rollout_restart_replaces_each_pod_of_a_set(site: Site) -> None:
    before = {each.name: each.address for each in site.cluster.pods()}
    target = "statefulset/chat-baton-decode"
    for step in ("restart", "status"):
        site.user.typed(f"{site.user.command(f'kubectl rollout {step}')} {target}")
    after = {each.name: each.address for each in site.cluster.pods()}
    changed = {name for name, address in after.items() if before[name] != address}
    assert changed == {"chat-baton-decode-0", "chat-baton-decode-1"}


def test_a_failed_upgrade_is_found_and_rolled_back(site: Site) -> None:
    """The last pod of each role ends with code 78, the others serve on; a rollback needs no other
    command."""
    first = site.cluster.pod("chat-baton-decode-0").address
    site.upgraded(BROKEN)
    waiting = site.user.command("kubectl rollout status statefulset/RELEASE-baton-decode")
    assert "decode-1" in site.user.typed(f"{waiting} --timeout={STUCK_S}s", code=1)
    failed = "chat-baton-decode-1"
    wait_until(lambda: site.cluster.pod(failed).restarts > 0, READY_S, every_s=0.2)
    described = site.user.documented("kubectl describe pod POD", POD=failed)
    assert re.search(r"Exit Code: +78\n", described), described
    assert "step.chunk_tokens" in site.user.documented("kubectl logs POD --previous", POD=failed)
    kept = site.cluster.pod("chat-baton-decode-0")
    assert kept.ready and kept.address == first
    site.user.documented("helm rollback RELEASE")
    site.cluster.settle()
    assert site.cluster.pod("chat-baton-decode-0").address == first
    assert re.search(r"handoffs: [1-9]\d* of 5 prompts", site.user.typed("helm test chat"))


def test_workers_wait_for_a_model_that_a_job_downloads(site: Site) -> None:
    hub = site.cluster.folder / "programs" / "hf"  # of the images
    hub.write_text(HUB.format(delay_s=HUB_S))
    hub.chmod(0o755)
    site.upgraded(DOWNLOADED)
    listed = site.user.command("kubectl get pods")
    wait_until(lambda: "Init:0/1" in site.user.typed(listed), READY_S, every_s=0.5)
    (job,) = site.rows(site.user.documented("kubectl get jobs")).values()
    site.cluster.settle()
    assert job[0] == "chat-baton-model-" + job[0][-8:]
    done = site.rows(site.user.documented("kubectl get jobs"))
    assert done[job[0]][1:] == ["Complete", "1/1"]
    said = site.user.documented("kubectl logs job/", HASH=job[0][-8:])
    assert said.startswith("downloaded into /models/"), said
    assert re.search(r"handoffs: [1-9]\d* of 5 prompts", site.user.typed("helm test chat"))


def test_each_command_of_this_file_was_typed(site: Site) -> None:
    assert {*site.user.used} == {*IN_PODS[Path(__file__).name]}


def test_no_container_outlived_its_grace_period(site: Site) -> None:
    site.cluster.check()
    assert site.cluster.killed_late == []
