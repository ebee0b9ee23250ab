"""`helm` and `kubectl` of a user whose cluster is a PodCluster: what the documents tell to type.

Each is a small program that passes its arguments to the test by a socket, and prints the answer.
helm: install, upgrade, rollback, test; kubectl: kubectl.py. Anything else is refused, so that a
document cannot ask for more unseen. A forwarded port is one of the pod's own loopback, as it is
where a kubelet forwards it.
"""

from __future__ import annotations

import argparse
import json
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any

import yaml

from tests.support.chart import FOLDER, ROOT, Release, merged, render
from tests.support.pods.cluster import NAMESPACE, PodCluster
from tests.support.pods.kubectl import Kubectl

PROGRAM = """#!{python} -IS
import ctypes, json, os, socket, sys, threading
with socket.socket(socket.AF_UNIX) as call:
    call.connect({path!r})
    call.sendall(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]).encode() + b"\\n")
    answer = json.loads(call.makefile().read())
print(answer["text"], end="", flush=True)

def entered(namespace, port):
    # this thread stays in the other network namespace
    handle = os.open("/run/netns/" + namespace, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns", namespace)
    os.close(handle)
    return socket.create_connection(("127.0.0.1", port))

def served(near):
    try:
        far = entered(*answer["forward"])
    except OSError as error:
        print(error, file=sys.stderr)
        return near.close()
    threading.Thread(target=passed, args=(far, near), daemon=True).start()
    passed(near, far)

def passed(source, target):
    while content := source.recv(65536):
        target.sendall(content)
    target.shutdown(socket.SHUT_WR)

if "forward" in answer:
    server = socket.create_server(("127.0.0.1", answer["listen"]))
    while True:
        near, _ = server.accept()
        threading.Thread(target=served, args=(near,), daemon=True).start()
sys.exit(answer["code"])
"""


class Programs:
    """The programs of one user, in `folder`."""

    def __init__(self, cluster: PodCluster, folder: Path) -> None:
        self._cluster, self._kubectl = cluster, Kubectl(cluster)
        self._releases: list[Release] = []  # a history, for rollback
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
            return self._kubectl.answer(words[1:])
        except BaseException as error:  # the program tells its caller
            return {"text": f"{words[0]}: {type(error).__name__}: {error}\n", "code": 1}

    def _helm(self, words: list[str]) -> str:
        line = argparse.ArgumentParser(exit_on_error=False)
        line.add_argument("-n", default=NAMESPACE)
        line.add_argument("step", choices=["install", "upgrade", "test", "rollback"])
        line.add_argument("name")
        line.add_argument("chart", nargs="?")
        line.add_argument("-f", action="append", default=[])
        given = line.parse_args(words)
        if given.step == "test":
            assert self.release is not None, "nothing is installed"
            return self._cluster.run_test(self.release)
        if given.step == "rollback":
            self._apply(self._releases[-2], "pre-rollback")
            return "Rollback was a success! Happy Helming!\n"
        if (ROOT / str(given.chart)).resolve() != FOLDER:
            raise ValueError(f"{given.chart} is not the chart")
        values = merged(*(yaml.safe_load((ROOT / path).read_text()) for path in given.f))
        release = render(values, name=given.name, namespace=NAMESPACE)
        self._apply(release, f"pre-{given.step}")
        return f"NOTES:\n{release.notes}"

    def _apply(self, release: Release, hook: str) -> None:
        self._cluster.apply(release, hook)
        self.release = release
        self._releases.append(release)
