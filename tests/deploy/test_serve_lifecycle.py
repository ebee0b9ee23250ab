"""`baton serve` as a real process over stand-in jobs: ready line, restarts, Ctrl-C at any time.

After each test no process of the instance is left, found by the marker in its environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from baton.deploy.cli import process_list
from baton.deploy.cli.chat import ChatClient
from baton.deploy.host.authority import files_of
from baton.deploy.host.instance import processes_of, read_environment, read_status
from baton.runtime.certificates import read
from baton.runtime.cluster_config import SecurityConfig
from tests.support.stand_in_serve import StandInServe
from tests.support.waiting import wait_until


def test_a_ready_server_answers_and_ctrl_c_leaves_nothing(
    serving: Callable[..., StandInServe],
) -> None:
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
    for name in ("prefill-0", "decode-0"):  # serve prints its progress even if it is ready at once
        assert re.search(
            rf"{name} loading weights: 25 % of 4.29 GB\n.*{name} ready", served.seen, re.S
        )


def test_the_curl_line_is_quoted_for_any_model_name(stand_in_model: Path) -> None:
    served = StandInServe(stand_in_model.rename(stand_in_model.with_name("it's mine")), "process")
    try:
        words = shlex.split(served.until(r"^  (curl .*)$")[1])
        assert json.loads(words[words.index("-d") + 1])["model"] == "it's mine"
    finally:
        assert served.interrupt()[0] == 0


def test_it_is_ready_only_when_linked_to_every_worker(
    serving: Callable[..., StandInServe],
) -> None:
    served = serving(fault="late-link")
    url = served.until(r"Ready at (http://\S+) after")[1]
    with urllib.request.urlopen(f"{url}/asked", timeout=10) as answer:
        assert json.load(answer) == 8  # seven said: no prefill worker yet
    assert served.interrupt()[0] == 0


def test_the_secret_is_on_no_command_line(serving: Callable[..., StandInServe]) -> None:
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


def test_each_process_has_a_certificate_while_it_serves(
    serving: Callable[..., StandInServe],
) -> None:
    served = serving()
    served.until("Ready at")
    folder, now = served.folder() / "tls", datetime.now(UTC)
    for name in ("router", "prefill-0", "decode-0"):
        files = files_of(folder, name)
        given = {key.split(".")[1]: value for key, value in files.settings().items()}
        assert read(SecurityConfig(**given), now).ends > now
    assert served.interrupt()[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    "moment", [pytest.param("model", marks=pytest.mark.nightly), "starting", "prefill-0 ready"]
)
def test_ctrl_c_while_it_starts_leaves_nothing(
    serving: Callable[..., StandInServe], moment: str
) -> None:
    served = serving()
    served.until(moment)
    instance_id = read_environment(served.folder())["BATON_INSTANCE"]
    assert served.interrupt() == (0, "")
    assert processes_of(instance_id) == []


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_while_gpus_are_counted_is_a_clean_stop(
    serving: Callable[..., StandInServe], number: signal.Signals
) -> None:
    served = serving(fault="slow-gpus")
    pid = served.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    wait_until(lambda: children.read_text() != "")
    child = int(children.read_text())
    wait_until(lambda: os.getsid(child) == child)  # the terminal's Ctrl-C is not for it
    served.process.send_signal(number)
    assert served.finish() == (0, "")
    assert not Path(f"/proc/{child}").exists()


def test_kill_9_of_serve_leaves_nothing(serving: Callable[..., StandInServe]) -> None:
    served = serving()
    served.until("Ready at")
    instance_id = read_environment(served.folder())["BATON_INSTANCE"]
    served.process.kill()
    served.finish()
    wait_until(lambda: processes_of(instance_id) == [])


def test_a_killed_worker_is_started_again_and_said(serving: Callable[..., StandInServe]) -> None:
    served = serving()
    served.until("Ready at")
    status = read_status(served.folder(), "decode-0")
    assert status is not None
    os.kill(status.pid, signal.SIGKILL)
    served.until(r"decode-0 died \(signal 9\); restarted")
    assert served.interrupt()[0] == 0


def test_the_demo_streams_one_answer_and_ends(serving: Callable[..., StandInServe]) -> None:
    served = serving("process", "once")
    assert served.finish() == (0, "")
    assert "stand-in  two words" in served.seen
    assert "First token after" in served.seen


def test_ps_lists_every_job(
    serving: Callable[..., StandInServe], capsys: pytest.CaptureFixture[str]
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
