"""The Ray driver against a Ray that is scripted: what it asks for, and how its ends are
reported."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from baton.deploy.host.instance import Instance, read_job
from baton.deploy.serve import ray_driver
from baton.deploy.serve.ray_driver import WorkerActor, connect, drive, place
from baton.deploy.serve.ray_launcher import RayLauncher, driver_command
from baton.runtime.errors import BatonError, ConfigError, Unavailable
from tests.support.waiting import wait_until

ON_CPU = {"prefill-0": 0.0, "decode-0": 0.0}


class RayError(Exception): ...


class FakeRay(ModuleType):
    """What the driver uses of Ray. `room` and `failure` script its answers."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.room = True
        self.failure: Exception | None = None
        self.inits: list[dict[str, object]] = []
        self.bundles: list[dict[str, float]] = []
        self.strategy = ""
        self.options: list[dict[str, object]] = []
        self.made: list[tuple[str, str]] = []
        self.killed: list[str] = []
        self.shutdowns = 0
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "10.0.0.1",
            placement_group=self._group,
            scheduling_strategies=SimpleNamespace(
                PlacementGroupSchedulingStrategy=lambda group, placement_group_bundle_index: (
                    placement_group_bundle_index
                )
            ),
        )

    def init(self, **settings: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.inits.append(settings)

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> SimpleNamespace:
        self.bundles, self.strategy = bundles, strategy
        return SimpleNamespace(wait=lambda timeout: self.room)

    def remote(self, made: type) -> SimpleNamespace:
        assert made is WorkerActor
        return SimpleNamespace(options=self._options)

    def _options(self, **options: object) -> SimpleNamespace:
        self.options.append(options)
        return SimpleNamespace(remote=self._actor)

    def _actor(self, folder: str, name: str) -> SimpleNamespace:
        self.made.append((folder, name))
        return SimpleNamespace(name=name, check=SimpleNamespace(remote=lambda: name))

    def get(self, references: list[str], timeout: float) -> list[str]:
        if self.failure is not None:
            raise self.failure
        return references

    def kill(self, actor: SimpleNamespace) -> None:
        self.killed.append(actor.name)

    def shutdown(self) -> None:
        self.shutdowns += 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


@pytest.fixture
def restored_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder of an instance whose name leaves room for those of sockets."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def test_without_an_address_a_local_ray_is_started(ray: FakeRay, tmp_path: Path) -> None:
    assert connect(tmp_path, "") is ray
    connect(tmp_path, "10.0.0.9:6379")
    assert [init["address"] for init in ray.inits] == ["local", "10.0.0.9:6379"]
    assert ray.inits[0]["include_dashboard"] is False
    assert not {"include_dashboard", "_temp_dir"} & set(ray.inits[1])  # a cluster's own affair
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


@pytest.mark.parametrize("error", [ConnectionError("no head"), RuntimeError("x"), ValueError("y")])
def test_an_unusable_ray_is_reported_with_a_remedy(
    ray: FakeRay, tmp_path: Path, error: Exception
) -> None:
    ray.failure = error
    with pytest.raises(ConfigError, match=r"a local Ray.*--launcher process") as caught:
        connect(tmp_path, "")
    assert str(error) in str(caught.value)
    with pytest.raises(ConfigError, match="10.0.0.9:1 cannot be used"):
        connect(tmp_path, "10.0.0.9:1")


def test_a_missing_ray_is_reported_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="not installed.*--launcher process"):
        connect(tmp_path, "")


def test_a_local_ray_keeps_its_files_with_the_instance(
    ray: FakeRay, short: Path, tmp_path: Path
) -> None:
    """As long as its sockets' names are short enough there; of those before, the last one's."""
    for number in range(3):
        (short / "ray" / f"session_2026-01-0{number + 1}").mkdir(parents=True)
    connect(short, "")
    connect(tmp_path / ("long" * 25), "")
    assert [init["_temp_dir"] for init in ray.inits] == [str(short / "ray"), None]
    assert [left.name for left in (short / "ray").iterdir()] == ["session_2026-01-03"]


def test_workers_have_local_bundles_and_restarting_actors(ray: FakeRay) -> None:
    actors = place(ray, Path("/run/i"), ON_CPU)
    assert [actor.name for actor in actors] == ["prefill-0", "decode-0"]
    assert ray.made == [("/run/i", "prefill-0"), ("/run/i", "decode-0")]
    assert ray.strategy == "STRICT_PACK" and len(ray.bundles) == 2
    for bundle in ray.bundles:
        assert set(bundle) == {"CPU", "node:10.0.0.1"} and all(0 < v < 1 for v in bundle.values())
    assert [options["scheduling_strategy"] for options in ray.options] == [0, 1]
    assert {options["max_restarts"] for options in ray.options} == {-1}
    assert {options["num_gpus"] for options in ray.options} == {0}


@pytest.mark.parametrize("gpus", [{"prefill-0": 0.5, "decode-0": 0.5}, {"p": 1.0, "d": 4.0}])
def test_workers_get_their_gpus_from_one_bundle(ray: FakeRay, gpus: dict[str, float]) -> None:
    """Also those of all ranks: an actor sees the GPUs of its bundle alone."""
    place(ray, Path("/run/i"), gpus)
    assert [bundle["GPU"] for bundle in ray.bundles] == [*gpus.values()]
    assert [options["num_gpus"] for options in ray.options] == [*gpus.values()]


def test_workers_on_the_cpu_take_no_gpu_from_others(ray: FakeRay) -> None:
    place(ray, Path("/run/i"), ON_CPU)
    assert all("GPU" not in bundle for bundle in ray.bundles)
    assert [options["num_gpus"] for options in ray.options] == [0, 0]


def test_a_ray_without_gpus_is_reported_with_a_remedy(ray: FakeRay) -> None:
    ray.room = False
    with pytest.raises(ConfigError, match="which want 0.5, 2 GPUs: give --device cpu"):
        place(ray, Path("/run/i"), {"prefill-0": 0.5, "decode-0": 2.0})


def test_a_host_without_room_is_reported(ray: FakeRay) -> None:
    ray.room = False
    with pytest.raises(ConfigError, match="no room for 1 workers.*10.0.0.1"):
        place(ray, Path("/run/i"), {"decode-0": 0.0})
    assert ray.made == []


def test_an_actor_that_does_not_start_is_our_error(ray: FakeRay) -> None:
    ray.failure = RayError("actor died")
    with pytest.raises(Unavailable, match="no actor for a worker: actor died"):
        place(ray, Path("/run/i"), {"decode-0": 0.0})


def test_the_driver_stays_until_a_signal_and_then_lets_ray_go(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_signals: None
) -> None:
    monkeypatch.setenv("BATON_INSTANCE", "id")
    signal.signal(signal.SIGUSR1, lambda *_: None)
    seen: list[tuple[str, list[str], int]] = []

    def send(number: signal.Signals) -> None:
        seen.append(((tmp_path / "ray.placed").read_text(), list(ray.killed), ray.shutdowns))
        os.kill(os.getpid(), number)

    timers = [
        threading.Timer(after_s, send, [number])
        for after_s, number in ((0.2, signal.SIGUSR1), (0.4, signal.SIGTERM))
    ]
    for timer in timers:
        timer.start()
    drive(tmp_path, ON_CPU, "")
    assert seen == [("id", [], 0)] * 2
    assert ray.killed == ["prefill-0", "decode-0"] and ray.shutdowns == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_driver_places_ends_it_after_that(
    ray: FakeRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restored_signals: None,
    number: signal.Signals,
) -> None:
    def place_and_signal(ray: ModuleType, folder: Path, workers: dict[str, float]) -> list[object]:
        os.kill(os.getpid(), number)
        return place(ray, folder, workers)

    monkeypatch.setattr(ray_driver, "place", place_and_signal)
    drive(tmp_path, ON_CPU, "")
    assert ray.killed == ["prefill-0", "decode-0"] and ray.shutdowns == 1


def test_ray_is_let_go_where_nothing_could_be_placed(
    ray: FakeRay, tmp_path: Path, restored_signals: None
) -> None:
    ray.room = False
    with pytest.raises(ConfigError):
        drive(tmp_path, {"decode-0": 0.0}, "")
    assert ray.shutdowns == 1 and not (tmp_path / "ray.placed").exists()


class Tending:
    """A launcher whose turns are scripted: each entry is raised, or is None. Then all go well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Exception | None) -> None:
        self.turns = 0
        self.script = list(script)
        self.made: list[tuple[Path, list[str]]] = []
        self.lives: list[bool | OSError] = [True]
        monkeypatch.setattr(ray_driver, "TEND_S", 0.001)
        monkeypatch.setattr(ray_driver, "ProcessLauncher", self._make)
        monkeypatch.setattr(ray_driver, "is_locked", self._is_locked)

    def _make(self, folder: Path, names: list[str]) -> Tending:
        self.made.append((folder, names))
        return self

    def _is_locked(self, path: Path) -> bool:
        assert path.name == "lifeline"
        if isinstance(self.lives[0], OSError):
            raise self.lives[0]
        return self.lives[0]

    def tend(self) -> None:
        self.turns += 1
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error

    def end(self, actor: WorkerActor) -> None:
        self.lives[0] = False
        actor.thread.join(10)  # else it goes on by the next test's rules
        assert not actor.thread.is_alive()


def fails(actor: WorkerActor, error: type[Exception]) -> bool:
    """Whether an error of that type keeps it from its work."""
    try:
        actor.check()
    except error:
        return True
    return False


def test_an_actor_keeps_its_job_and_ends_with_the_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tending = Tending(monkeypatch)
    actor = WorkerActor(str(tmp_path), "decode-0")
    wait_until(lambda: tending.turns > 3)
    assert tending.made == [(tmp_path, ["decode-0"])]
    assert actor.check() == "decode-0"
    tending.end(actor)


@pytest.mark.parametrize(
    "error", [BatonError("no room"), OSError(24, "no room"), KeyError("no room")]
)
def test_an_actor_goes_on_after_any_error_and_says_it_once(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
) -> None:
    tending = Tending(monkeypatch, *[error] * 1000)
    actor = WorkerActor(str(tmp_path), "decode-0")
    wait_until(lambda: tending.turns > 20)
    with pytest.raises(type(error), match="no room"):
        actor.check()
    tending.script.clear()
    wait_until(lambda: not fails(actor, type(error)))
    assert actor.check() == "decode-0"
    tending.end(actor)
    (line,) = (tmp_path / "decode-0.log").read_text().splitlines()
    assert "decode-0" in line and "no room" in line


def test_an_actor_that_cannot_look_at_the_lifeline_looks_again(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tending = Tending(monkeypatch)
    tending.lives[0] = OSError(24, "too many open files")
    actor = WorkerActor(str(tmp_path / "gone"), "decode-0")  # nor is there a log
    wait_until(lambda: fails(actor, OSError))
    tending.lives[0] = True
    wait_until(lambda: tending.turns > 0)
    tending.end(actor)
    assert "too many open files" in capfd.readouterr().err


def test_the_launcher_keeps_one_more_job_that_names_the_others(instance: Instance) -> None:
    gpus = {"prefill-0": 0.3333, "decode-0": 2.0}
    RayLauncher(instance, ["router"], gpus, "auto")
    job = read_job(instance.folder, "ray")
    assert job.argv == driver_command(instance.folder, gpus, "auto")
    assert job.argv[-3:] == ("auto", "prefill-0=0.3333", "decode-0=2")
    assert "baton.deploy.serve.ray_driver" in job.argv


def test_no_ray_is_taken_that_asks_for_no_token() -> None:
    """A local cluster listens on the host's address; what speaks to it runs code. From 2.59 on it
    asks for a token unless the user has switched that off."""
    root = Path(__file__).resolve().parents[2]
    reported = tomllib.loads((root / "pyproject.toml").read_text())
    (floor,) = [x for x in reported["project"]["optional-dependencies"]["worker"] if x[:3] == "ray"]
    (pinned,) = [
        line
        for line in (root / "requirements/cpu.txt").read_text().splitlines()
        if line[:3] == "ray"
    ]
    for text in (floor, pinned):
        assert tuple(int(n) for n in text.replace("==", ">=").split(">=")[1].split(".")[:2]) >= (
            2,
            59,
        )
    code = (root / "deploy/serve/ray_driver.py").read_text()
    assert "AUTH_MODE" not in code and "dashboard_host" not in code
