"""`baton serve` as a real process over stand-in jobs: ready line, Ctrl-C at any time, failures.

After each test no process of the instance is left, found by the marker in its environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.deploy.cli import process_list
from baton.deploy.cli.chat import ChatClient
from baton.deploy.host.authority import files_of
from baton.deploy.host.instance import (
    live_instances,
    processes_of,
    read_environment,
    read_status,
)
from baton.runtime.certificates import read
from baton.runtime.cluster_config import SecurityConfig
from baton.runtime.registry import DirectoryRegistry

Wait = Callable[[Callable[[], bool]], bool]
STAND_IN = Path(__file__).with_name("stand_in.py")
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 16,
    "max_position_embeddings": 64,
}


class Served:
    """A running stand-in serve and what it has printed."""

    def __init__(self, model: Path, launcher: str, *rest: str, port: int = 0, fault: str = ""):
        environment = os.environ | {"STAND_IN": fault}
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(STAND_IN), "serve", str(model), str(port), launcher, *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seen = ""

    def until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.seen += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in:\n{self.seen}\n{self.process.communicate()[1]}")

    def folder(self) -> Path:
        (folder,) = live_instances()
        return folder

    def interrupt(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    def finish(self) -> tuple[int, str]:
        out, err = self.process.communicate(timeout=100)
        self.seen += out
        return self.process.returncode, err


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What can be known of it without torch is right; nothing reads the weights."""
    folder = tmp_path / "stand-in"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def serving(model: Path, runtime_folder: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(launcher: str = "process", *rest: str, port: int = 0, fault: str = "") -> Served:
        started.append(Served(model, launcher, *rest, port=port, fault=fault))
        return started[-1]

    yield start
    for served in started:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate(timeout=60)
    assert live_instances() == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_ready_server_answers_and_ctrl_c_leaves_nothing(serving: Callable[..., Served]) -> None:
    served = serving()
    url = served.until(r"Ready at (http://\S+) after")[1]
    instance_id = read_environment(served.folder())["BATON_INSTANCE"]
    folder = served.folder()
    assert len(processes_of(instance_id)) == 6
    assert served.until(r"curl -N (\S+)/v1/chat/completions")[1] == url
    client = ChatClient(url)
    assert [model.name for model in client.models()] == ["stand-in"]
    assert "".join(client.stream("stand-in", [])) == "two words"
    assert served.interrupt()[0] == 0
    assert processes_of(instance_id) == []
    assert not folder.exists()
    assert "prefill-0 ready" in served.seen and "no process is left" in served.seen
    for name in ("prefill-0", "decode-0"):  # told before it is ready, also where that is soon
        assert re.search(
            rf"{name} loading weights: 25 % of 4.29 GB\n.*{name} ready", served.seen, re.S
        )


def test_the_curl_line_is_quoted_for_any_model_name(model: Path) -> None:
    served = Served(model.rename(model.with_name("it's mine")), "process")
    try:
        words = shlex.split(served.until(r"^  (curl .*)$")[1])
        assert json.loads(words[words.index("-d") + 1])["model"] == "it's mine"
    finally:
        assert served.interrupt()[0] == 0


def test_it_is_ready_only_when_linked_to_every_worker(
    serving: Callable[..., Served],
) -> None:
    served = serving(fault="late-link")
    url = served.until(r"Ready at (http://\S+) after")[1]
    with urllib.request.urlopen(f"{url}/asked", timeout=10) as answer:
        assert json.load(answer) == 8  # seven said: no prefill worker yet
    assert served.interrupt()[0] == 0


def test_the_secret_is_on_no_command_line(serving: Callable[..., Served]) -> None:
    served = serving()
    served.until("Ready at")
    environment = read_environment(served.folder())
    assert len(environment["BATON_TOKEN"]) == 64
    assert environment["OMP_WAIT_POLICY"] == "passive"
    for pid in processes_of(environment["BATON_INSTANCE"]):
        assert environment["BATON_TOKEN"].encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert environment["BATON_ADMIN_KEY"].encode() not in command
        assert b"BATON_TOKEN=" in Path(f"/proc/{pid}/environ").read_bytes()
    assert served.interrupt()[0] == 0


def test_each_process_has_a_certificate_while_it_serves(serving: Callable[..., Served]) -> None:
    served = serving()
    served.until("Ready at")
    folder, now = served.folder() / "tls", datetime.now(UTC)
    for name in ("router", "prefill-0", "decode-0"):
        files = files_of(folder, name)
        given = {key.split(".")[1]: value for key, value in files.settings().items()}
        assert read(SecurityConfig(**given), now).ends > now
    assert served.interrupt()[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize("moment", ["model", "starting", "prefill-0 ready"])
def test_ctrl_c_while_it_starts_leaves_nothing(serving: Callable[..., Served], moment: str) -> None:
    served = serving()
    served.until(moment)
    instance_id = read_environment(served.folder())["BATON_INSTANCE"]
    assert served.interrupt() == (0, "")
    assert processes_of(instance_id) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_gpus_are_counted_is_a_clean_stop(
    serving: Callable[..., Served], wait_for: Wait, number: signal.Signals
) -> None:
    served = serving(fault="slow-gpus")
    pid = served.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    assert wait_for(lambda: children.read_text() != "")
    child = int(children.read_text())
    assert wait_for(lambda: os.getsid(child) == child)  # the terminal's Ctrl-C is not for it
    served.process.send_signal(number)
    assert served.finish() == (0, "")
    assert not Path(f"/proc/{child}").exists()


def test_kill_9_of_serve_leaves_nothing(serving: Callable[..., Served], wait_for: Wait) -> None:
    served = serving()
    served.until("Ready at")
    instance_id = read_environment(served.folder())["BATON_INSTANCE"]
    served.process.kill()
    served.finish()
    assert wait_for(lambda: processes_of(instance_id) == [])


def test_a_killed_worker_is_started_again_and_said(serving: Callable[..., Served]) -> None:
    served = serving()
    served.until("Ready at")
    status = read_status(served.folder(), "decode-0")
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    served.until(r"decode-0 died \(signal 9\); restarted")
    assert served.interrupt()[0] == 0


def test_a_wrong_model_ends_it_with_one_message(serving: Callable[..., Served]) -> None:
    code, err = serving(fault="bad-model").finish()
    assert (code, err) == (78, "baton: error: model.safetensors lacks a tensor\n")


def test_a_model_no_worker_could_serve_is_refused_at_once(
    serving: Callable[..., Served], model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["NewForCausalLM"]}))
    served = serving("ray")
    code, err = served.finish()
    assert code == 78
    assert "config.json: architectures" in err and "NewForCausalLM" in err
    assert served.seen == ""


def test_a_missing_shard_is_reported_before_any_start(
    serving: Callable[..., Served], model: Path
) -> None:
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    served = serving("ray")
    code, err = served.finish()
    assert code == 78
    assert f"{model / 'model-2.safetensors'}: shard of" in err and "it has b" in err
    assert served.seen == ""


def test_a_truncated_shard_is_reported_before_any_start(
    serving: Callable[..., Served], model: Path
) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry}).encode()
    cut = model / "model.safetensors"
    cut.write_bytes(len(header).to_bytes(8, "little") + header + bytes(5))
    served = serving("ray")
    code, err = served.finish()
    assert code == 78 and served.seen == ""
    size = cut.stat().st_size
    assert f"{cut}: tensor a [2]" in err and f"{size} of its {size + 3} bytes: it is" in err


def test_a_crashing_worker_ends_it_with_the_end_of_its_log(serving: Callable[..., Served]) -> None:
    code, err = serving(fault="crash").finish()
    assert code == 78
    assert "cannot be kept running (exit code 1)" in err
    assert err.rstrip().endswith("ValueError: a bug")


def test_logs_are_kept_where_the_user_wants_them(
    serving: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "logs"
    monkeypatch.setenv("STAND_IN_LOGS", str(kept))
    code, err = serving(fault="crash").finish()
    assert code == 78 and err.rstrip().endswith("ValueError: a bug")
    ends = [path.read_text().rstrip()[-17:] for path in kept.glob("*-decode-0.log")]
    assert ends == ["ValueError: a bug"] and live_instances() == []


def test_workers_that_never_get_ready_end_it(serving: Callable[..., Served]) -> None:
    code, err = serving(fault="mute").finish()
    assert code == 1
    assert "decode-0, prefill-0 not ready in time" in err


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_TOKEN", "of the nodes")


@pytest.mark.usefixtures("token")
def test_progress_of_workers_on_other_nodes_is_shown(serving: Callable[..., Served]) -> None:
    served = serving("nodes")
    served.until("prefill-0 ready at 10.0.0.1:90")
    served.until("prefill-0 memory: 3 GB of KV")
    served.until("decode-0 on 10.0.0.2: loading weights: 25 % of 4.29 GB")
    served.until("decode-0 ready at 10.0.0.2:90")
    assert served.interrupt()[0] == 0


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize(
    ("fault", "ends", "why", "log"),
    [
        ("crash", 78, "its process ended (exit code 1)", "Traceback:\nValueError: a bug"),
        (
            "mute",
            1,
            "loading weights: 25 % of 4.29 GB",
            "a line\nThe time of --start-timeout is over",
        ),
    ],
)
def test_a_worker_of_another_node_that_is_not_ready_ends_it(
    serving: Callable[..., Served], fault: str, ends: int, why: str, log: str
) -> None:
    code, err = serving("nodes", fault=fault).finish()
    said = f"error: decode-0 on 10.0.0.2 is not ready: {why}. The end of its log:\n{log}"
    assert code == ends and err.rstrip().endswith(said), err


def test_a_port_in_use_is_refused_at_once(serving: Callable[..., Served]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        served = serving(port=port)
        code, err = served.finish()
    assert code == 78
    assert f"port {port} on 127.0.0.1 cannot be used" in err and "--port" in err
    assert served.seen == ""


def test_a_second_serve_on_the_same_port_is_refused(serving: Callable[..., Served]) -> None:
    port = free_port()
    first = serving(port=port)
    first.until("Ready at")
    code, err = serving(port=port).finish()
    assert code == 78 and "--port" in err
    assert first.process.poll() is None
    assert first.interrupt()[0] == 0


def test_the_demo_streams_one_answer_and_ends(serving: Callable[..., Served]) -> None:
    served = serving("process", "once")
    assert served.finish() == (0, "")
    assert "stand-in  two words" in served.seen
    assert "First token after" in served.seen


def test_ps_lists_every_job(
    serving: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    assert process_list.show(as_json=False) == 1
    assert "no `baton serve` of this user runs here" in capsys.readouterr().out
    served = serving()
    url = served.until(r"Ready at (http://\S+) after")[1]
    assert process_list.show(as_json=True) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == {"router", "prefill-0", "decode-0"}
    assert {row["state"] for row in rows.values()} == {"running"}
    assert url == f"http://{rows['router']['address']}"
    assert rows["decode-0"]["model"] == "m" and rows["decode-0"]["audit"] == {}
    assert process_list.show(as_json=False) == 0
    assert "prefill-0" in capsys.readouterr().out
    assert served.interrupt()[0] == 0


def ray_daemons(instance_id: str) -> list[int]:
    daemons = (b"raylet", b"gcs_server")
    found = []
    for pid in processes_of(instance_id):
        program = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
        if program.rsplit(b"/", 1)[-1] in daemons:
            found.append(pid)
    return found


@pytest.mark.timeout(300)
def test_under_ray_workers_outlive_its_head_and_are_adopted(
    serving: Callable[..., Served], wait_for: Wait
) -> None:
    served = serving("ray")
    served.until("Ray has placed the workers")
    served.until("Ready at")
    folder = served.folder()
    instance_id = read_environment(folder)["BATON_INSTANCE"]
    before = {r.worker_id: r.pid for r in DirectoryRegistry(folder / "registry").workers()}
    assert set(before) == {"prefill-0", "decode-0"}
    daemons = ray_daemons(instance_id)
    assert len(daemons) == 2
    driver = read_status(folder, "ray")
    assert driver is not None
    (folder / "ray.placed").unlink()
    for pid in (*daemons, driver.pid):
        os.kill(pid, signal.SIGKILL)
    served.until(r"ray died \(signal 9\); restarted")
    assert wait_for((folder / "ray.placed").exists)
    after = {r.worker_id: r.pid for r in DirectoryRegistry(folder / "registry").workers()}
    assert after == before
    os.kill(before["decode-0"], signal.SIGKILL)
    served.until(r"decode-0 died \(signal 9\); restarted")
    assert served.interrupt()[0] == 0
    assert processes_of(instance_id) == []
