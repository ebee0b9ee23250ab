"""Peers over pipes: a real process with the real loop, and an engine that only counts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.peers import engines as peers
from tests.support.waiting import wait_until

FOLDER = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(Path(__file__).with_name("scripted_peer.py"))]
STARTED = ["model", "--threads=2", "--kv-gib=1", "--step-tokens=64", "--sequences=1"]


@contextmanager
def process(*command: str) -> Iterator[peers.PeerProcess]:
    with closing(peers.PeerProcess(command)) as made:
        yield made


def test_requests_are_answered_in_turn() -> None:
    with process(*SCRIPT, *STARTED) as made:
        assert made.answer()["facts"]["kv"] == "bf16"
        held = made.ask(do="hold", prompts=[[1, 2], [3]])
        assert held["first"] == [7, 7]
        assert len(made.ask(do="steps", count=3)["seconds"]) == 3
        assert made.ask(do="drop") == {}


def test_our_settings_of_threads_are_not_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setenv("GOMP_SPINCOUNT", "0")
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    with process(*SCRIPT, *STARTED) as made:
        assert made.answer()["facts"]["inherited"] == "none"


def test_a_peer_that_fails_shows_its_log() -> None:
    with process(*SCRIPT, *STARTED) as made:
        made.answer()
        with pytest.raises(RuntimeError, match=r"(?s)ended.*no room for thirteen"):
            made.ask(do="hold", prompts=[[13]])
        with pytest.raises(RuntimeError, match="ended"):
            made.ask(do="drop")


def test_a_peer_that_cannot_start() -> None:
    with (
        process(sys.executable, "-c", "raise SystemExit('no such engine')") as made,
        pytest.raises(RuntimeError, match=r"(?s)ended.*no such engine"),
    ):
        made.answer()


def test_a_silent_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 0.2)
    with (
        process(sys.executable, "-c", "import time; time.sleep(60)") as made,
        pytest.raises(RuntimeError, match=r"gave no answer for 0\.2 s"),
    ):
        made.answer()


def test_close_ends_the_peer_and_its_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('{\"child\": %d}' % child.pid, flush=True)\n"
        "child.wait()"
    )
    made = peers.PeerProcess([sys.executable, "-c", program])
    child = made.answer()["child"]
    made.close()
    wait_until(lambda: gone(child), 20)  # it dies when it has its turn


def gone(pid: int) -> bool:
    """Or dead, and not yet waited for by its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_rounds_become_ratios() -> None:
    with closing(peers.Peer("openvino", SCRIPT, Path("model"), 2)) as peer:
        peer.compare([[1, 2, 3], [4, 5, 6]], [7, 8])
        peer.hold_batch([[1, 2]] * 3)
        for own_s in (0.5, 1.0):  # the first is warm-up
            peer.forget()
            peer.prefill([[1, 2, 3], [4, 5, 6]], own_s)
            peer.decode_one([1, 2, 3], 4, own_s)
            peer.decode_batch(4, own_s)
        assert peer.facts["sequences"] == "1" and peer.facts["threads"] == "2"
        assert peer.agreed == [True, False]
        assert peer.rounds.ratios == peer.rounds.seconds  # ours took 1 s
        figures = {figure.name: figure for figure in peers.figures(peer)}
    assert figures["prefill_vs_openvino"].beside == "limit: at least 1.5"
    assert figures["decode_bs1_vs_openvino"].beside == "limit: at least 1.15"
    assert figures["decode_bs32_vs_openvino"].beside == "limit: at least 1.5"
    assert figures["decode_bs32_vs_openvino"].holds is False  # it took no time at all
    assert figures["openvino_same_first_token"].value == 0.5
    assert figures["openvino_same_first_token"].beside == "of 2"
    milliseconds = figures["openvino_prefill_ms"].value
    assert milliseconds == pytest.approx(figures["prefill_vs_openvino"].value * 1e3)


def test_the_fastest_of_a_few_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            {"seconds": 4.0, "first": [1]},
            {},
            {"seconds": 3.0, "first": [2]},
            {},
            {},
            {"seconds": [0.4, 0.2, 0.3]},
            {},
        ]
    )
    with closing(peers.Peer("vllm", SCRIPT, Path("model"), 2)) as peer:
        monkeypatch.setattr(peers.PeerProcess, "ask", lambda self, **request: next(answers))
        peer.prefill([[1], [2]], 1.5)
        peer.decode_one([1], 3, 0.1)
    assert peer.rounds.ratios["prefill"] == [2.0]
    assert peer.rounds.ratios["decode_bs1"] == [2.0]


def test_notes_say_what_ran_and_what_was_left_out() -> None:
    with closing(peers.Peer("vllm", SCRIPT, Path("model"), 2)) as peer:
        left_out, ran = peers.notes([peer])
    assert left_out == (
        "*_vs_openvino left out: give --openvino PYTHON (benchmarks/peers/README.md)"
    )
    assert ran.startswith("vllm: kv bf16, threads 2")


def test_every_peer_has_a_program_and_a_way_to_install_it() -> None:
    text = (FOLDER / "benchmarks" / "peers" / "README.md").read_text()
    for name, limits in peers.LIMITS.items():
        assert len(limits) == len(peers.KINDS)
        assert (FOLDER / "benchmarks" / "peers" / f"{name}_peer.py").is_file()
        assert f"--{name} " in text


def test_vllm_gets_the_environment_of_its_own_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.peers import vllm_peer

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 1, 2})
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    allocator = tmp_path / "lib" / "libtcmalloc_minimal.so.4"
    allocator.parent.mkdir()
    allocator.touch()
    made = vllm_peer.environment(threads=2, kv_gib=3)
    assert made["KMP_AFFINITY"] == "granularity=fine,explicit,proclist=[1,2]"
    assert made["OMP_NUM_THREADS"] == "2"
    assert made["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert made["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:{allocator}"
