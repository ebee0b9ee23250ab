"""Failures that end `baton serve`, and what it says of them: models, shards, workers that crash or
never get ready, ports in use."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.deploy.host.instance import live_instances
from tests.support.stand_in_serve import LLAMA, StandInServe, free_port


def test_a_wrong_model_ends_it_with_one_message(serving: Callable[..., StandInServe]) -> None:
    code, err = serving(fault="bad-model").finish()
    assert (code, err) == (78, "baton: error: model.safetensors lacks a tensor\n")


def test_a_model_no_worker_could_serve_is_refused_at_once(
    serving: Callable[..., StandInServe], stand_in_model: Path
) -> None:
    (stand_in_model / "config.json").write_text(
        json.dumps(LLAMA | {"architectures": ["NewForCausalLM"]})
    )
    served = serving("ray")
    code, err = served.finish()
    assert code == 78
    assert "config.json: architectures" in err and "NewForCausalLM" in err
    assert served.seen == ""


def test_a_missing_shard_is_reported_before_any_start(
    serving: Callable[..., StandInServe], stand_in_model: Path
) -> None:
    (stand_in_model / "model.safetensors").rename(stand_in_model / "model-1.safetensors")
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (stand_in_model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    served = serving("ray")
    code, err = served.finish()
    assert code == 78
    assert f"{stand_in_model / 'model-2.safetensors'}: shard of" in err and "it has b" in err
    assert served.seen == ""


def test_a_truncated_shard_is_reported_before_any_start(
    serving: Callable[..., StandInServe], stand_in_model: Path
) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry}).encode()
    cut = stand_in_model / "model.safetensors"
    cut.write_bytes(len(header).to_bytes(8, "little") + header + bytes(5))
    served = serving("ray")
    code, err = served.finish()
    assert code == 78 and served.seen == ""
    size = cut.stat().st_size
    assert f"{cut}: tensor a [2]" in err and f"{size} of its {size + 3} bytes: it is" in err


def test_a_crashing_worker_ends_it_with_the_end_of_its_log(
    serving: Callable[..., StandInServe],
) -> None:
    code, err = serving(fault="crash").finish()
    assert code == 78
    assert "cannot be kept running (exit code 1)" in err
    assert err.rstrip().endswith("ValueError: a bug")


def test_logs_are_kept_where_the_user_wants_them(
    serving: Callable[..., StandInServe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "logs"
    monkeypatch.setenv("STAND_IN_LOGS", str(kept))
    code, err = serving(fault="crash").finish()
    assert code == 78 and err.rstrip().endswith("ValueError: a bug")
    ends = [path.read_text().rstrip()[-17:] for path in kept.glob("*-decode-0.log")]
    assert ends == ["ValueError: a bug"] and live_instances() == []


def test_workers_that_never_get_ready_end_it(serving: Callable[..., StandInServe]) -> None:
    code, err = serving(fault="mute").finish()
    assert code == 1
    assert "decode-0, prefill-0 not ready in time" in err


def test_a_port_in_use_is_refused_at_once(serving: Callable[..., StandInServe]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        served = serving(port=port)
        code, err = served.finish()
    assert code == 78
    assert f"port {port} on 127.0.0.1 cannot be used" in err and "--port" in err
    assert served.seen == ""


def test_a_second_serve_on_the_same_port_is_refused(serving: Callable[..., StandInServe]) -> None:
    port = free_port()
    first = serving(port=port)
    first.until("Ready at")
    code, err = serving(port=port).finish()
    assert code == 78 and "--port" in err
    assert first.process.poll() is None
    assert first.interrupt()[0] == 0
