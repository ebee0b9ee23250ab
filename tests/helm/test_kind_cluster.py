"""The documented installation in a real cluster, made by kind where a machine has the programs.

No machine that ran these tests had a container engine, so nothing here is proven on a real cluster:
scripted programs on PATH show the order of the commands, their names, and that no cluster is left.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.chart import FOLDER, example, merged, render
from tests.support.kind_cluster import cpu_builds, kind_cluster, programs_missing
from tests.support.newcomer import documented, first_streamed_token_s

MISSING = programs_missing()
# Each program notes its words; `helm install` prints real notes, curl a stream.
SCRIPT = """#!{python} -IS
import json, os, pathlib, socket, sys
folder = pathlib.Path({folder!r})
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
given = {{"words": words, "to": os.environ.get("KUBECONFIG"),
          "provider": os.environ.get("KIND_EXPERIMENTAL_PROVIDER")}}
with open(folder / "calls", "a") as calls:
    calls.write(json.dumps(given) + "\\n")
line = " ".join(words)
if {failing!r} and line.startswith({failing!r}):
    sys.exit("scripted failure")
if line.startswith("helm install"):
    print((folder / "notes").read_text())
elif words[0] == "curl":
    print('data: {{"choices": [{{"delta": {{"content": "Hi"}}}}]}}\\n\\ndata: [DONE]')
elif "port-forward" in words:
    server = socket.create_server(("127.0.0.1", int(words[-1])))
    while True:
        server.accept()[0].close()
"""


@pytest.mark.nightly
@pytest.mark.timeout(5400)
@pytest.mark.skipif(bool(MISSING), reason=f"no kind cluster here, not on PATH: {MISSING}")
def test_a_newcomer_installs_in_a_real_cluster(tmp_path: Path) -> None:
    """Needs port 8000 of this machine, and a network from which images come. Unproven (above)."""
    installed(tmp_path)


def installed(folder: Path) -> None:
    with kind_cluster(folder) as cluster:
        took_s = first_streamed_token_s(cluster, cluster.logs)
        print(f"first streamed token {took_s:.1f} s after helm install, in a kind cluster")
        cluster.typed(documented("helm test"))  # fails unless KV moved


def scripted(
    folder: Path, patch: pytest.MonkeyPatch, failing: str = "", engine: str = "docker"
) -> None:
    """Put the programs on PATH, of which one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    values = merged(example("cpu-demo"), {"router": {"port": port}})
    (folder / "notes").write_text(render(values, namespace="default").notes)
    programs = folder / "programs"
    programs.mkdir()
    for name in ("kind", "kubectl", "helm", "curl", engine):
        path = programs / name
        path.write_text(SCRIPT.format(python=sys.executable, folder=str(folder), failing=failing))
        path.chmod(0o755)
    patch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def calls(folder: Path) -> list[str]:
    """Return what was called, and check that each call is one to the test's own cluster."""
    lines = (folder / "calls").read_text().splitlines()
    given = [json.loads(line) for line in lines]
    assert {each["to"] for each in given} == {str(folder / "kubeconfig")}
    return [" ".join(each["words"]) for each in given]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_the_images_are_built_loaded_and_the_page_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    scripted(tmp_path, monkeypatch, engine=engine)
    if engine == "podman":  # also where this machine has docker
        monkeypatch.setattr("tests.support.kind_cluster.ENGINES", (engine,))
    assert programs_missing() == ""
    installed(tmp_path)
    made = calls(tmp_path)
    images = ["baton-router:0.1.0", "baton-worker:0.1.0"]
    assert [line for line in made if " build " in line] == [
        f"{engine} build -f deploy/docker/{image.split(':')[0][6:]}.Dockerfile"
        f" -t docker.io/library/{image} ."
        for image in images
    ]
    name = next(line for line in made if line.startswith("kind create")).split()[4]
    assert name.startswith("baton-") and len(name) == 14
    steps = [line.replace(name, "NAME").replace(str(tmp_path), "FOLDER") for line in made]
    own = "--name NAME --kubeconfig FOLDER/kubeconfig"
    first = steps.index(f"kind create cluster {own} --wait 300s")
    assert steps[first - 1].endswith(f"save -o FOLDER/image-1.tar docker.io/library/{images[1]}")
    assert steps[first + 1 : first + 5] == [
        "kind load image-archive FOLDER/image-0.tar --name NAME",
        "kind load image-archive FOLDER/image-1.tar --name NAME",
        documented("helm install"),
        "kubectl -n default rollout status deployment/chat-baton-router",
    ]
    assert any(" port-forward service/chat-baton-router " in line for line in steps[first:])
    assert any(line.startswith("curl -N http://127.0.0.1:") for line in steps[first:])
    assert steps[-2:] == ["helm test chat", f"kind delete cluster {own}"]


@pytest.mark.parametrize(
    "failing", ["docker build", "kind create", "kind load", "helm install", "curl", "helm test"]
)
def test_no_cluster_is_left_when_a_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    scripted(tmp_path, monkeypatch, failing)
    with pytest.raises(AssertionError, match="scripted failure"):
        installed(tmp_path)
    made = calls(tmp_path)
    created = [line.split()[4] for line in made if line.startswith("kind create")]
    deleted = [line.split()[4] for line in made if line.startswith("kind delete")]
    assert created == deleted and bool(created) == (failing != "docker build")
    if created:
        assert made[-1].startswith("kind delete")


def test_missing_programs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs_missing() == "kind, kubectl, helm, curl, docker or podman"


def test_the_images_are_those_that_the_demo_names() -> None:
    named = merged(yaml.safe_load((FOLDER / "values.yaml").read_text()), example("cpu-demo"))
    assert {image for image, _ in cpu_builds()} == {
        named["image"]["router"], named["image"]["worker"]
    }  # fmt: skip
