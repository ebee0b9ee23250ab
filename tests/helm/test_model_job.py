"""The job that downloads a model, and the containers that wait for it: their scripts are run here,
with a program in the place of the hub's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton.deploy.serve.hub import FILES
from tests.support.chart import (
    Document,
    Release,
    Values,
    merged,
    render,
    render_newer,
)
from tests.support.waiting import wait_until

MODEL = {"model": {"repository": "owner/name", "revision": "0a1b2c", "tokenSecret": "hub"}}
HF = Path(sys.executable).with_name("hf")
STAND_IN = """#!/bin/sh
printf '%s\\n' "$@" > "$CALLS"
exit "$CODE"
"""


@pytest.fixture(scope="module")
def release() -> Release:
    return render(MODEL)


@pytest.fixture(scope="module")
def job(release: Release) -> Document:
    """The job's container."""
    (found,) = [e for e in release.of_kind("Job") if "-model-" in e["metadata"]["name"]]
    (container,) = found["spec"]["template"]["spec"]["containers"]
    return dict(container)


def jobs_of(release: Release) -> dict[str, Document]:
    """The specification of each job that downloads a model, by its name."""
    found = [e for e in release.of_kind("Job") if "-model-" in e["metadata"]["name"]]
    return {each["metadata"]["name"]: each["spec"] for each in found}


@pytest.mark.parametrize(
    "change",
    [
        {"image": {"worker": "another"}},
        {"image": {"pullPolicy": "Always"}},
        {"image": {"pullSecrets": ["ours"]}},
        {"model": {"tokenSecret": "another"}},
        {"model": {"volume": {"existingClaim": "another"}}},
        {"model": {"revision": "another"}},
    ],
    ids=lambda change: str(next(iter(next(iter(change.values()))))),
)
def test_another_job_has_another_name(release: Release, change: Values) -> None:
    """Kubernetes refuses to change a Job's pods: an upgrade would fail."""
    other = render(merged(MODEL, change))
    assert len(jobs_of(release)) == 1 and not jobs_of(release).keys() & jobs_of(other).keys()


def test_another_version_of_the_chart_keeps_the_job(release: Release, tmp_path: Path) -> None:
    """Else each upgrade would end a download that runs."""
    found = render_newer(MODEL, tmp_path)
    assert jobs_of(found) == jobs_of(release)
    assert "9.9.9" in str(found.documents)


def download(job: Document, folder: Path, code: int = 0) -> tuple[int, list[str]]:
    """Run the job's script with a hub that ends with `code`; return the script's exit code and
    the arguments that the hub's program got."""
    programs, calls = folder / "programs", folder / "calls"
    programs.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    (programs / "hf").write_text(STAND_IN)
    (programs / "hf").chmod(0o755)
    given = {each["name"]: each["value"] for each in job["env"] if "value" in each}
    own = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), "CODE": str(code)}
    environment = given | own | {"FOLDER": str(folder)}
    done = subprocess.run([*job["command"], *job["args"]], env=environment, check=False)
    return done.returncode, calls.read_text().splitlines() if calls.exists() else []


def test_a_download_gets_the_files_that_baton_reads(job: Document, tmp_path: Path) -> None:
    code, words = download(job, tmp_path)
    assert code == 0 and words[:2] == ["download", "owner/name"]
    pairs = list(zip(words, words[1:], strict=False))
    assert ("--revision", "0a1b2c") in pairs and ("--local-dir", str(tmp_path)) in pairs
    taken = {value for flag, value in pairs if flag == "--include"}
    assert taken == {each for each in FILES if not each.endswith(".index.json")}
    assert {"*.json"} <= taken  # which the index is too
    (token,) = [each for each in job["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_the_hubs_program_has_the_flags(job: Document, tmp_path: Path) -> None:
    _, words = download(job, tmp_path)
    shown = subprocess.run([HF, "download", "--help"], capture_output=True, text=True, check=True)
    flags = {each for each in words if each.startswith("--")}
    assert flags and flags <= set(re.findall(r"--[a-z-]+", shown.stdout))


def test_a_model_that_is_there_is_not_fetched_again(job: Document, tmp_path: Path) -> None:
    assert download(job, tmp_path)[1] != []
    assert download(job, tmp_path) == (0, [])


def test_a_download_that_failed_does_not_count(job: Document, tmp_path: Path) -> None:
    code, words = download(job, tmp_path, code=3)
    assert code == 3 and words and not (tmp_path / ".complete").exists()
    assert download(job, tmp_path)[1] != []


def ended_by_sigterm(words: list[str]) -> int:
    """Return the exit code of a shell that gets SIGTERM while it sleeps."""
    with subprocess.Popen(words) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: children.read_text() != "", 10)
        process.terminate()
        return process.wait(10)


@pytest.mark.parametrize("orchestrator", ["plain", "kuberay"])
def test_pods_wait_until_the_model_is_there(orchestrator: str, tmp_path: Path) -> None:
    found = []
    for _, pod in render(merged(MODEL, {"orchestrator": orchestrator})).pods():
        for container in pod.get("initContainers", ()):
            if container["name"] == "ray-certificate":
                continue
            (script,) = container["args"]
            (waited,) = re.findall(r'"(\S+)/\.complete"', script)
            (mounted,) = [each for each in container["volumeMounts"] if each["name"] == "models"]
            assert waited.startswith(mounted["mountPath"])
            words = [*container["command"], script.replace(waited, str(tmp_path))]
            with pytest.raises(subprocess.TimeoutExpired):
                subprocess.run(words, timeout=0.3, check=False)
            assert ended_by_sigterm(words) == 143  # by a handler, which process 1 needs
            (tmp_path / ".complete").touch()
            assert subprocess.run(words, timeout=10, check=False).returncode == 0
            (tmp_path / ".complete").unlink()
            found.append(container["image"])
    assert len(found) == 3  # a router, and workers of both roles
