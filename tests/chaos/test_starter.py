"""A fleet ends with the process that has started it, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from chaos import network, starter
from chaos.cluster import Cluster, Site
from chaos.network import Network

ROOT = Path(__file__).resolve().parents[2]
ENDS_S = 10
SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")
PARENT = """
import sys, threading
from pathlib import Path
from chaos.cluster import Cluster, Site

prefix = tuple(sys.argv[2:])
cluster = Cluster(Path(sys.argv[1]), site=lambda name: Site(prefix))
sleeps = (sys.executable, "-c", "import time; time.sleep(600)")
starting = threading.Thread(
    target=cluster.start_worker, args=("decode", "decode-0"), kwargs={"command": sleeps}
)
starting.start()
starting.join()
print(cluster.pid("decode-0"), flush=True)
threading.Event().wait(600)
"""


def ends_with_its_parent(folder: Path, prefix: tuple[str, ...], *, stopped: bool) -> None:
    command = [sys.executable, "-c", PARENT, str(folder), *prefix]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            child = os.pidfd_open(pid)
            assert SLEEPS[-1].encode() in runs(pid)
            if stopped:
                os.kill(pid, signal.SIGSTOP)
            assert not select.select([child], [], [], 0)[0]
        finally:
            parent.kill()
        ended = bool(select.select([child], [], [], ENDS_S)[0])
        if not ended:
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
    assert ended


def runs(pid: int) -> bytes:
    """Its command line, once it is no longer what has started it."""
    looking = threading.Event()
    for _ in range(1000):
        found = Path(f"/proc/{pid}/cmdline").read_bytes()
        if found and b"prctl" not in found and b"netns" not in found:  # empty: as it changes
            break
        looking.wait(0.01)
    return found


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_9_of_a_parent_ends_its_fleet(tmp_path: Path, stopped: bool) -> None:
    ends_with_its_parent(tmp_path, (), stopped=stopped)


def test_also_one_in_a_network_namespace(tmp_path: Path) -> None:
    if why := network.unavailable():
        pytest.skip(why)
    with Network() as made:
        ends_with_its_parent(tmp_path, made.add("decode-0").prefix, stopped=False)


def test_the_end_of_the_thread_that_asked_for_it_is_nobodys_end(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, site=lambda _: Site())

    def begin() -> None:
        cluster.start_worker("decode", "decode-0", command=SLEEPS)
        assert SLEEPS[-1].encode() in runs(cluster.pid("decode-0"))

    starting = threading.Thread(target=begin)
    try:
        starting.start()
        starting.join()
        child = os.pidfd_open(cluster.pid("decode-0"))
        assert not select.select([child], [], [], 0.3)[0]
        os.close(child)
    finally:
        cluster.close()


def test_an_orphan_does_not_begin(tmp_path: Path) -> None:
    """As it would find itself if that had died between the two."""
    began = tmp_path / "began"
    command = [sys.executable, "-I", "-S", "-c", starter.BOUND_PROGRAM, "0", "touch", str(began)]
    assert subprocess.run(command, timeout=ENDS_S).returncode == 0
    assert not began.exists()
