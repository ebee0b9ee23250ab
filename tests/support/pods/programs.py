"""`helm` and `kubectl` of a user whose cluster is a PodCluster: what the documents tell to type.

Each is a small program that passes its arguments to the test by a socket, and prints the answer.
helm: install, upgrade, test. kubectl: rollout status, get secret, raycluster or pods, patch
raycluster or secret, port-forward, exec, delete pod or secret, logs. Anything else is refused, so
that a document cannot ask for more unseen.
"""

from __future__ import annotations

import argparse
import json
import socketserver
import sys
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import FOLDER, ROOT, Release, merged, render
from tests.support.pods.cluster import NAMESPACE, PodCluster
from tests.support.pods.manifests import object_of
from tests.support.pods.pod import Pod

EXEC_S = 120.0
PROGRAM = """#!{python} -IS
import json, os, socket, sys, threading
with socket.socket(socket.AF_UNIX) as call:
    call.connect({path!r})
    call.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
    answer = json.loads(call.makefile().read())
print(answer["text"], end="", flush=True)

def passed(source, target):
    while content := source.recv(65536):
        target.sendall(content)
    target.shutdown(socket.SHUT_WR)

if "forward" in answer:
    server = socket.create_server(("127.0.0.1", answer["listen"]))
    while True:
        near, _ = server.accept()
        far = socket.create_connection(tuple(answer["forward"]))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=passed, args=pair, daemon=True).start()
sys.exit(answer["code"])
"""


class Programs:
    """The programs of one user, in `folder`."""

    def __init__(self, cluster: PodCluster, folder: Path) -> None:
        self._cluster = cluster
        self.release: Release | None = None
        self.folder = folder
        folder.mkdir()
        path = folder / "calls"
        programs = self

        class CallHandler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                answer = programs.answer(json.loads(self.rfile.readline()))
                self.wfile.write(json.dumps(answer).encode())

        class CallServer(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self._server = CallServer(str(path), CallHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        for name in ("helm", "kubectl"):
            program = folder / name
            program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
            program.chmod(0o755)

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, words: list[str]) -> dict[str, Any]:
        """Return what a program prints, its exit code, and where a forwarded port leads."""
        try:
            if words[0] == "helm":
                return {"text": self._helm(words[1:]), "code": 0}
            return self._kubectl(words[1:])
        except BaseException as error:  # the program tells its caller
            return {"text": f"{words[0]}: {type(error).__name__}: {error}\n", "code": 1}

    def _helm(self, words: list[str]) -> str:
        line = argparse.ArgumentParser(exit_on_error=False)
        line.add_argument("-n", default=NAMESPACE)
        line.add_argument("step", choices=["install", "upgrade", "test"])
        line.add_argument("name")
        line.add_argument("chart", nargs="?")
        line.add_argument("-f", action="append", default=[])
        given = line.parse_args(words)
        if given.step == "test":
            assert self.release is not None, "nothing is installed"
            return self._cluster.run_test(self.release)
        if (ROOT / str(given.chart)).resolve() != FOLDER:
            raise ValueError(f"{given.chart} is not the chart")
        values = merged(*(yaml.safe_load((ROOT / path).read_text()) for path in given.f))
        self.release = render(values, name=given.name, namespace=NAMESPACE)
        self._cluster.apply(self.release, f"pre-{given.step}")
        return f"NOTES:\n{self.release.notes}"

    def _kubectl(self, words: list[str]) -> dict[str, Any]:
        while words[0] == "-n":
            words = words[2:]
        if words[:2] == ["rollout", "status"]:
            kind, name = words[2].split("/")
            self._cluster.settle(only=name)
            return {"text": f'{kind} "{name}" successfully rolled out\n', "code": 0}
        if words[:2] == ["get", "secret"]:
            (path,) = [each for each in words if each.startswith("jsonpath=")]
            key = path.removeprefix("jsonpath={.data.").removesuffix("}")
            data = self._cluster.api.data(words[2])
            return {"text": b64encode(data[key]).decode(), "code": 0}
        if words[0] == "port-forward":
            address = self._cluster.endpoints(words[1].removeprefix("service/"), "http")[0]
            text = f"Forwarding from 127.0.0.1:{words[2]}\n"
            return {"text": text, "code": 0, "forward": address, "listen": int(words[2])}
        if words[0] == "exec":
            pod = self._pod(words[1])
            name = words[3] if words[2] == "-c" else pod.spec["containers"][0]["name"]
            done = pod.container(name).run(words[words.index("--") + 1 :], EXEC_S)
            return {"text": done.stdout + done.stderr, "code": done.returncode}
        if words[0] == "get" and words[-2:] == ["-o", "json"]:
            return {"text": json.dumps(self._objects(words[1:-2])), "code": 0}
        if words[:2] == ["patch", "raycluster"] and words[3:5] == ["--type=json", "-p"]:
            self._cluster.api.rayclusters.patch(words[2], json.loads(words[5]))
            return {"text": f"raycluster.ray.io/{words[2]} patched\n", "code": 0}
        if words[:2] == ["patch", "secret"] and words[3] == "-p":
            given = json.loads(words[4])["stringData"]
            data = {key: value.encode() for key, value in given.items()}
            self._cluster.api.put(words[2], {**self._cluster.api.data(words[2]), **data})
            return {"text": f"secret/{words[2]} patched\n", "code": 0}
        if words[:2] == ["delete", "secret"]:
            del self._cluster.api.secrets[words[2]]
            return {"text": f'secret "{words[2]}" deleted\n', "code": 0}
        if words[:2] == ["delete", "pod"]:
            listed = words[2] == "-l"
            pods = self._labelled(words[3]) if listed else [self._cluster.pod(words[2])]
            for pod in pods:
                pod.delete()
            return {"text": "".join(f'pod "{pod.name}" deleted\n' for pod in pods), "code": 0}
        if words[0] == "logs":
            return {"text": self._cluster.pod(words[1]).logs(), "code": 0}
        raise ValueError(f"{words[0]} is not known here")

    def _objects(self, words: list[str]) -> dict[str, Any]:
        """Return a RayCluster, or a list of the pods with a label."""
        if words[0] == "raycluster":
            return self._cluster.api.rayclusters.objects[words[1]]
        if words[:2] != ["pods", "-l"]:
            raise ValueError(f"get {' '.join(words)} is not known here")
        return {"kind": "List", "items": [object_of(each) for each in self._labelled(words[2])]}

    def _labelled(self, selector: str) -> list[Pod]:
        name, _, value = selector.partition("=")
        return [each for each in self._cluster.pods() if each.labels.get(name) == value]

    def _pod(self, named: str) -> Pod:
        """Return a pod by its name, or the first one of deployment/NAME."""
        kind, _, name = named.rpartition("/")
        if not kind:
            return self._cluster.pod(name)
        if kind != "deployment":
            raise ValueError(f"exec {named} is not known here")
        return next(each for each in self._cluster.pods() if each.name.startswith(f"{name}-"))
