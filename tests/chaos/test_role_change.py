"""The scenario of a role change against a cluster that only writes down its calls: what it
checks of a worker that comes back as another process, loads again, or gets no work."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from chaos import role_change as scenario
from chaos.clients import Clients
from chaos.cluster import Cluster
from chaos.role_change import change_role
from chaos.stage import Stage


class OneWorker:
    """`prefill-0`, whose log is a file. Each look at its metrics shows `work` more prompts."""

    def __init__(self, folder: Path, *, work: float = 1.0) -> None:
        self.folder = folder
        self.reported: list[tuple[str, ...]] = []
        self.process, self.work, self.admitted = 7, work, 0.0
        self.log("the configuration", "model loaded")

    def log(self, *events: str) -> None:
        with (self.folder / "prefill-0.log").open("a") as file:
            file.writelines(f'{{"event": "{event}"}}\n' for event in events)

    def pid(self, _: str) -> int:
        return 7

    def workers(self) -> list[str]:
        return ["prefill-0"]

    def wait_ready(self, _: int) -> None:
        self.reported.append(("ready",))

    def change_role(self, name: str, role: str) -> None:
        self.reported.append((name, role))

    def records(self) -> dict[str, SimpleNamespace]:
        return {"prefill-0": SimpleNamespace(pid=self.process)}

    def metric(self, name: str, metric: str) -> float:
        assert (name, metric) == ("prefill-0", "baton_queue_seconds_count")
        self.admitted += self.work
        return self.admitted


def stage_of(cluster: OneWorker) -> Stage:
    no_clients = cast(Clients, None)  # this fault asks no client for anything
    return Stage(cast(Cluster, cluster), clients=no_clients, asks=(), longs=(), hold_s=0.0)


async def test_there_and_back_in_one_process_with_one_load(tmp_path: Path) -> None:
    cluster = OneWorker(tmp_path)
    stage = stage_of(cluster)
    await change_role(stage, "prefill-0")
    assert cluster.reported == [
        ("prefill-0", "decode"), ("ready",), ("prefill-0", "prefill"), ("ready",),
    ]  # fmt: skip
    assert not stage.broken
    (note,) = stage.notes
    assert "in one process (1 load of weights)" in note


async def test_another_process_breaks_it(tmp_path: Path) -> None:
    cluster = OneWorker(tmp_path)
    cluster.process = 8
    stage = stage_of(cluster)
    await change_role(stage, "prefill-0")
    assert "not the process that it was" in stage.broken[0]


async def test_a_second_load_of_weights_breaks_it(tmp_path: Path) -> None:
    class Reloading(OneWorker):
        def change_role(self, name: str, role: str) -> None:
            self.log("worker ready", "model loaded")

    stage = stage_of(Reloading(tmp_path))
    await change_role(stage, "prefill-0")
    assert "loaded its weights again" in stage.broken[0]


async def test_a_role_in_which_it_gets_no_work_breaks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenario, "USED_S", 0.2)
    stage = stage_of(OneWorker(tmp_path, work=0.0))
    await change_role(stage, "prefill-0")
    assert stage.broken == [
        f"prefill-0 was not used as a {role} worker within 0.2 s" for role in ("decode", "prefill")
    ]
