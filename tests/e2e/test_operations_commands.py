"""The commands of docs/operations.md and docs/kubernetes.md that can run here are run, on a real
instance and on a real cluster around a registry; the others are listed with the reason, and checked
as far as that goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.deploy.cli.main import parser
from baton.models.embedded import embedded_model
from chaos.redis_server import running_server
from tests.support.operations_page import PAGES, ROOT, arguments, documented_commands
from tests.support.pod_commands import IN_PODS, patched
from tests.support.redis_server import required_binary
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(600)

BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
READY_S = 240.0
FOUND = documented_commands()
SIZES = [each for each in FOUND if each.startswith("baton size ")]  # tests/test_operations.py
SERVED = (  # in this order, on a running `baton serve`
    "curl http://HOST:PORT/readyz",
    "curl http://HOST:PORT/metrics",
    "curl http://HOST:ADMIN/readyz",
    "curl http://HOST:ADMIN/audit",
    "baton ps",
    "baton ps --json",
    "baton explain FILE",
    "baton trace --slow",
    "baton trace ID",
    "baton doctor",
    "baton role WORKER prefill",
    "baton drain WORKER",
)
HOSTS = (  # in this order, on processes around a Redis server
    "baton authority issue --folder ca --role client --name operator --out operator-tls",
    "baton worker --role prefill --worker-id prefill-0 --model FOLDER "
    "--registry rediss://redis.example:6379/0 --set worker.host=0.0.0.0 "
    "--set worker.advertise=eth0 --set worker.admin_port=9100 --config SETTINGS",
    "baton router --model FOLDER --registry rediss://redis.example:6379/0 --config SETTINGS",
    "baton cluster status --registry rediss://redis.example:6379/0 --config SETTINGS",
    "baton doctor --registry",
    "baton role prefill-1 decode --registry rediss://redis.example:6379/0 --config SETTINGS",
    "baton drain decode-0 --registry rediss://redis.example:6379/0 --config SETTINGS",
)
NAME = re.compile(r"baton [a-z]+( [a-z]+)?")  # alone: a mention; tests/test_docs.py knows it
OPERATOR = "the KubeRay operator"
PODS = "needs pods; tests/helm/test_running_release.py runs it"
CONTROLLER = "needs a release with a controller; no test types it in pods"
RAY_PODS = "needs pods of KubeRay; no test types it"
TYPED_IN_PODS = list(dict.fromkeys(each for found in IN_PODS.values() for each in found))
NOT_HERE = {
    "make dashboards": "rewrites files of this tree; tests/deploy/test_monitoring.py compares them",
    "make install": "installs packages",
    "make locks": "asks the package index; tests/test_locks.py holds what it wrote against cpu.txt",
    "baton advise --set slo.ttft_s=2 --set slo.itl_s=0.05": "needs traffic; "
    "tests/deploy/test_advise.py runs it",
    "baton serve --placement disaggregated": "serves for as long as it runs; "
    "tests/e2e/test_demo.py runs `baton demo`, which has this placement",
    "baton fleet --follow": "needs nodes of Ray; tests/e2e/test_ray_size.py runs it",
    "baton controller --act": "acts for as long as it runs; tests/e2e/test_controller.py runs it",
    "baton controller --act --resize TARGET --workers MIN-MAX": "acts for as long as it runs, on "
    "Kubernetes or Ray; tests/e2e/test_ray_size.py runs it",
    "dmesg": "reads the kernel of the operator's host",
    "systemctl restart": "systemd",
    "systemctl status baton-router": "systemd",
    "systemctl status baton-worker@NAME": "systemd",
    "journalctl -u baton-worker@NAME": "systemd",
    "docker compose -f deploy/compose.yaml up": "Docker and two images",
    "docker compose -f deploy/compose.yaml -f deploy/compose-gpu.yaml up": "Docker and GPUs",
    "helm install chat helm/baton -f helm/baton/values-cpu-demo.yaml": PODS,
    "helm test chat": PODS,
    "kubectl create secret tls NAME --cert=CERTIFICATE_FILE --key=KEY_FILE": PODS,
    "curl -k https://127.0.0.1:8000/readyz": PODS,
    "kubectl delete pod RELEASE-baton-ray-redis-0": RAY_PODS,
    "kubectl delete pod -l ray.io/cluster=RELEASE-baton-ray": RAY_PODS,
    "kubectl scale deployment/RELEASE-baton-controller --replicas=0": CONTROLLER,
    "kubectl logs -l app.kubernetes.io/component=controller --prefix --tail=200": CONTROLLER,
    "kubectl exec deployment/RELEASE-baton-router -- baton cluster status": PODS,
    patched('"redis-password": "NEW"'): PODS,
    "kubectl exec RELEASE-baton-redis-0 -- "
    "valkey-cli -s /data/redis.sock acl setuser default '>NEW'": PODS,
    "kubectl delete secret RELEASE-baton-secrets": PODS,
    "kubectl delete secret RELEASE-baton-authority-key": PODS,
    "kubectl delete pod RELEASE-baton-redis-0": PODS,
    "kubectl delete pod -l app.kubernetes.io/instance=RELEASE": PODS,
    "kubectl delete pod": PODS,
    "kubectl get hpa": "an autoscaler and an adapter that serves custom metrics",
    "kubectl get raycluster": OPERATOR,
    "kubectl delete pod -l ray.io/cluster=RELEASE-baton-ray,ray.io/group=prefill": OPERATOR,
    "kubectl exec POD -- ls /dev/infiniband": PODS,
    "kubectl exec POD -- grep Max.locked /proc/self/limits": PODS,
    "kubectl exec POD -- env UCX_TLS=rc,cuda_copy baton doctor": PODS,
    "baton serve --ray-address HEAD:6379 --registry redis://...": "needs nodes of Ray; "
    "tests/e2e/test_serve_nodes.py runs it",
    "baton release replace RAYCLUSTER": "needs pods; tests/helm/test_running_raycluster.py runs it",
}


def test_files_that_type_commands_exist_and_assert_it() -> None:
    for name in IN_PODS:
        assert "IN_PODS[Path(__file__).name]" in (ROOT / "tests" / "helm" / name).read_text()


def test_each_documented_command_is_run_or_listed() -> None:
    handled = {*SIZES, *SERVED, *HOSTS, *TYPED_IN_PODS, *NOT_HERE}
    named = {each for each in FOUND if NAME.fullmatch(each)} - handled
    assert set(FOUND) - named == handled


@pytest.mark.parametrize("command", [*SERVED, *HOSTS, *TYPED_IN_PODS, *NOT_HERE])
def test_arguments_and_files_of_a_command_exist(command: str, tmp_path: Path) -> None:
    inner = re.sub(r"^env \S+=\S+ ", "", command.rpartition(" -- ")[2])
    if inner.startswith("baton "):
        words = arguments(inner, FILE=str(PAGES[0]), SETTINGS=str(PAGES[0]), WORKER="decode-0")
        if words[-1] != "--registry":
            parser().parse_args(words[1:])
    for path in re.findall(r"(?:deploy|helm)/\S+", command):
        assert (ROOT / path).exists()


def run(*words: str, environment: dict[str, str], codes: tuple[int, ...] = (0,)) -> str:
    """Run a command to its end and return what it prints."""
    program = BATON if words[0] == "baton" else (words[0],)
    done = subprocess.run(
        [*program, *words[1:]], env=environment, capture_output=True, text=True, timeout=180,
        check=False,
    )  # fmt: skip
    assert done.returncode in codes, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def until(happened: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    def happened_to_the_living() -> bool:
        if happened():
            return True
        assert all(each.poll() is None for each in processes), "a process has ended"
        return False

    wait_until(happened_to_the_living, READY_S, every_s=0.2)


def end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of an operator's shell, with instances of its own."""
    return os.environ | {
        "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("run")),
        "BATON_POOL__BLOCKS": "256",
        "BATON_WORKER__THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "0",
    }


@pytest.fixture(scope="module")
def instance(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """A running `baton serve`, as values for the placeholders of the page."""
    log = tmp_path_factory.mktemp("serve") / "log"
    words = ["serve", "--launcher", "process", "--port", "0", "--decode", "2"]
    with log.open("w") as out:
        process = subprocess.Popen(
            [*BATON, *words], env=environment, stdout=out, stderr=out, text=True
        )
    try:
        until(lambda: "Ready at" in log.read_text(), process)
        found = re.search(r"Ready at http://([\d.]+):(\d+)", log.read_text())
        assert found
        listed = json.loads(run("baton", "ps", "--json", environment=environment))
        worker = next(each for each in _workers(listed) if each["name"] == "decode-1")
        file = log.with_name("body.json")
        body = {"model": "baton-tiny", "prompt": "Tell me a story.", "max_tokens": 4}
        file.write_text(json.dumps(body))
        url = f"http://{found[1]}:{found[2]}/v1/completions"
        send = ["-sSi", "-H", "Content-Type: application/json", "-d", json.dumps(body), url]
        answer = run("curl", *send, environment=environment)
        request = re.search(r"(?im)^x-request-id: (\S+)", answer)
        assert request, answer
        yield {
            "HOST": found[1],
            "PORT": found[2],
            "ADMIN": str(worker["admin"]).rpartition(":")[2],
            "WORKER": "decode-1",
            "FILE": str(file),
            "ID": request[1],
            "url": f"http://{found[1]}:{found[2]}",
        }
    finally:
        end([process])


def _workers(listed: object) -> Iterator[dict[str, object]]:
    """Yield the objects with an admin port in the JSON of `baton ps`, at any depth."""
    if isinstance(listed, list):
        for each in listed:
            yield from _workers(each)
    elif isinstance(listed, dict):
        if "admin" in listed and "name" in listed:
            yield listed
        for each in listed.values():
            yield from _workers(each)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_for_an_instance_work_in_that_order(
    instance: dict[str, str], environment: dict[str, str]
) -> None:
    values = {key: value for key, value in instance.items() if key.isupper()}
    for command in SERVED:
        words = arguments(command, **values)
        if words[0] == "curl":
            words[1:1] = ["-sSf"]
        elif words[1] in ("trace", "explain"):
            words += ["--url", instance["url"]]
        codes = (0, 1) if words[1] == "doctor" else (0,)  # 1: a check of this machine failed
        printed = run(*words, environment=environment, codes=codes)
        assert printed.strip() or words[1] in ("drain", "role"), command
        if words[1:2] == ["trace"] and "--slow" not in words:
            assert values["ID"] in printed and "critical path" in printed


def settings_of(name: str, role: str, folder: Path, environment: dict[str, str]) -> Path:
    """Issue a certificate with the page's command and return a file of its settings."""
    command = HOSTS[0].replace("--role client", f"--role {role}").replace("operator", name)
    words = arguments(command, ca=str(folder / "ca"))
    words[-1] = str(folder / words[-1])
    if role == "worker":
        words += ["--host", "127.0.0.1"]
    printed = run(*words, environment=environment)
    pairs = re.findall(r"security\.(\w+)=(\S+)", printed)
    assert len(pairs) == 3, printed
    path = folder / f"{name}.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in pairs]
    path.write_text("\n".join(["[security]", *lines]) + "\n")
    return path


@pytest.mark.nightly
def test_commands_for_several_hosts_work_in_that_order(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """The hosts are this one; Redis speaks plain text, and ports are chosen by the system."""
    environment = environment | {"BATON_TOKEN": "one secret for all hosts"}
    started: list[subprocess.Popen[str]] = []

    def begin(command: str, server: str, settings: Path, *more: str) -> subprocess.Popen[str]:
        replaced = command.replace("rediss://redis.example:6379/0", server)
        replaced = replaced.replace("admin_port=9100", "admin_port=0").replace("eth0", "lo")
        words = arguments(replaced, FOLDER=str(embedded_model()), SETTINGS=str(settings))
        with settings.with_suffix(".log").open("w") as log:
            started.append(
                subprocess.Popen(
                    [*BATON, *words[1:], *more], env=environment, stdout=log, stderr=log, text=True
                )
            )
        return started[-1]

    run("baton", "authority", "create", "--folder", str(tmp_path / "ca"), environment=environment)
    issue, worker, router, *asked = HOSTS
    operator = settings_of("operator", "client", tmp_path, environment)
    assert issue.endswith("operator-tls") and (tmp_path / "operator-tls").is_dir()
    with running_server(tmp_path, required_binary()) as server:
        try:
            workers = {}
            for name in ("prefill-0", "prefill-1", "decode-0"):
                role = name.partition("-")[0]
                own = worker.replace("--role prefill", f"--role {role}").replace("prefill-0", name)
                settings = settings_of(name, "worker", tmp_path, environment)
                workers[name] = begin(own, server.url, settings)
            address = tmp_path / "router.address"
            settings = settings_of("router", "router", tmp_path, environment)
            more = ("--address-file", str(address), "--set", "router.port=0")
            begin(router, server.url, settings, *more)
            until(address.exists, *started)
            url = f"http://{address.read_text().strip()}/readyz"
            full = '"prefill":2'
            until(lambda: full in _body(url, environment), *started)
            for command in asked:
                words = arguments(
                    command.replace("rediss://redis.example:6379/0", server.url),
                    SETTINGS=str(operator),
                )
                if words[-1] == "--registry":
                    words += [server.url, "--config", str(operator)]
                codes = (0, 1) if words[1] == "doctor" else (0,)
                printed = run(*words, environment=environment, codes=codes)
                if words[1] == "cluster":
                    assert all(name in printed for name in workers)
            assert workers["decode-0"].wait(READY_S) == 0
            until(lambda: '"decode":1' in _body(url, environment))  # prefill-1, which took the role
        finally:
            end(started)


def _body(url: str, environment: dict[str, str]) -> str:
    return run("curl", "-sS", url, environment=environment).replace(" ", "")
