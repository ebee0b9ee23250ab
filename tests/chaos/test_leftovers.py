"""A run removes what a killed one left, and nothing that a living process may own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaos import network, ray_nodes, small_disk
from chaos.network import NAMES, Network
from chaos.small_disk import FOLDER_PREFIX, SmallDisk, remove_leftovers


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(60)
    return process.pid


def test_folders_of_ended_runs_alone_are_removed(tmp_path: Path, ended_pid: int) -> None:
    left = f"baton-chaos-{ended_pid}-abc"
    kept = {f"{FOLDER_PREFIX}abc", f"baton-soak-{ended_pid}-abc", f"baton-chaos-{ended_pid}"}
    for name in (left, *kept):
        (tmp_path / name / "inner").mkdir(parents=True)
    assert remove_leftovers(tmp_path) == [left]
    assert {each.name for each in tmp_path.iterdir()} == kept
    assert network.remove_leftovers(tmp_path / "none") == []


def test_folders_of_ended_ray_nodes_alone_are_removed(tmp_path: Path, ended_pid: int) -> None:
    living = f"{ray_nodes.FOLDER_PREFIX}abc"
    left = living.replace(str(os.getpid()), str(ended_pid))
    for name in (left, living, "rnabc"):
        (tmp_path / name / "head").mkdir(parents=True)
    assert ray_nodes.remove_leftovers(tmp_path) == [left]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_in_a_folder_is_unmounted(tmp_path: Path, ended_pid: int) -> None:
    if why := small_disk.unavailable():
        pytest.skip(why)
    folder = tmp_path / f"baton-chaos-{ended_pid}-abc"
    (folder / "fleet").mkdir(parents=True)
    SmallDisk(folder / "fleet").__enter__()
    assert remove_leftovers(tmp_path) == [folder.name]


def test_namespaces_of_ended_runs_alone_are_removed(
    ended_pid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why := network.unavailable():
        pytest.skip(why)
    with Network() as living, monkeypatch.context() as patch:
        living.add("decode-0")
        patch.setattr(os, "getpid", lambda: ended_pid)
        killed = Network()
        killed.__enter__()
        killed.add("decode-0")
        tag = f"bt{ended_pid % 100_000}-"
        removed = network.remove_leftovers()
        assert len([each for each in removed if each.startswith(tag)]) == 2
        living.cut("decode-0", "both")  # it is still there
        assert not any(each.startswith(tag) for each in os.listdir(NAMES))
