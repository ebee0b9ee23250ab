"""Peer engines beside ours: each in processes of its own Python, asked over pipes.

A peer is one program (openvino_peer.py, vllm_peer.py) in two processes: one holds a single
sequence at a time (prefill, decode at batch 1), the other one batch for the whole run, as its
prefill takes long. The protocol is that of request_loop.py. How a peer is installed:
benchmarks/peers/README.md. Owns the processes; `close` ends them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures.report import Figure, at_least

ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 300.0  # the first answer: export, compilation, loading
SETTLE_S = 0.05  # idle threads of a peer spin for some milliseconds before they sleep
KINDS = ("prefill", "decode_bs1", "decode_bs32")
LIMITS = {"openvino": (1.5, 1.15, 1.5), "vllm": (2.0, 2.0, 2.0)}  # of the three, in their order
STEP_TOKENS = 2048
ONE_GIB, MANY_GIB = 1, 3  # of KV
OURS_ALONE = ("OMP_", "GOMP_", "PYTHON")  # settings that are not for a peer


class PeerProcess:
    """One program of a peer, started in its own session; its log is shown when it fails."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        kept = {n: v for n, v in os.environ.items() if not n.startswith(OURS_ALONE)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=kept,
            start_new_session=True,
        )
        self._received = b""

    def ask(self, **request: object) -> dict[str, Any]:
        """Send one request and wait for its answer. Raises RuntimeError if none comes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("ended") from None
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line. Raises RuntimeError if the process ends or takes too long."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + ANSWER_S
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"gave no answer for {ANSWER_S:g} s")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._failure("ended")
                self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGKILL)  # not yet waited for, so the group exists
        self._process.wait(10)
        with contextlib.suppress(BrokenPipeError):  # it ended before it read what was asked
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def _failure(self, what: str) -> RuntimeError:
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-3000:]
        return RuntimeError(f"{self._process.args!r} {what}:\n{said}")


@dataclass(slots=True)
class PeerRounds:
    """One entry a round: seconds of the peer, and how many times ours that is."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in KINDS})
    ratios: dict[str, list[float]] = field(default_factory=lambda: {k: [] for k in KINDS})


class Peer:
    """One peer and its rounds; `facts` are its versions and precision."""

    def __init__(self, name: str, command: Sequence[str], model: Path, threads: int) -> None:
        self.name = name
        start = [*command, str(model), f"--threads={threads}", f"--step-tokens={STEP_TOKENS}"]
        self._alone = PeerProcess([*start, f"--kv-gib={ONE_GIB}", "--sequences=1"])
        self.facts: dict[str, str] = self._alone.answer()["facts"]
        self._batch: PeerProcess | None = None
        self._start_batch = [*start, f"--kv-gib={MANY_GIB}"]
        self.rounds = PeerRounds()
        self.agreed: list[bool] = []

    def hold_batch(self, prompts: Sequence[Sequence[int]]) -> None:
        """Start the second process and prefill its sequences, which stay for the whole run."""
        self._batch = PeerProcess([*self._start_batch, f"--sequences={len(prompts)}"])
        self._batch.answer()
        self._batch.ask(do="hold", prompts=prompts)

    def compare(self, prompts: Sequence[Sequence[int]], ours: Sequence[int]) -> None:
        """Whether it is the same model: `ours` are the first tokens that our engine drew."""
        for prompt, token in zip(prompts, ours, strict=True):
            self.agreed.append(self._alone.ask(do="hold", prompts=[prompt])["first"] == [token])
            self._alone.ask(do="drop")

    def prefill(self, prompts: Sequence[Sequence[int]], own_s: float) -> None:
        """One prompt after the other."""
        took = []
        for prompt in prompts:
            took.append(self._alone.ask(do="hold", prompts=[prompt])["seconds"])
            self._alone.ask(do="drop")
        self._found("prefill", min(took), own_s)

    def decode_one(self, prompt: Sequence[int], steps: int, own_s: float) -> None:
        self._alone.ask(do="hold", prompts=[prompt])
        took = self._alone.ask(do="steps", count=steps)["seconds"]
        self._alone.ask(do="drop")
        self._found("decode_bs1", min(took), own_s)

    def decode_batch(self, steps: int, own_s: float) -> None:
        assert self._batch is not None, "hold_batch comes first"
        took = self._batch.ask(do="steps", count=steps)["seconds"]
        self._found("decode_bs32", min(took), own_s)

    def forget(self) -> None:
        """Drop the measurements so far, which were warm-up."""
        self.rounds = PeerRounds()

    def close(self) -> None:
        for process in (self._alone, self._batch):
            if process is not None:
                process.close()

    def _found(self, kind: str, seconds: float, own_s: float) -> None:
        self.rounds.seconds[kind].append(seconds)
        self.rounds.ratios[kind].append(seconds / own_s)
        # Idle threads of a peer spin before they sleep.
        time.sleep(SETTLE_S)


def start(python: Path, name: str, model: Path, threads: int) -> Peer:
    """The peer `name`, run by the interpreter of its environment."""
    return Peer(name, [str(python), "-m", f"benchmarks.peers.{name}_peer"], model, threads)


def figures(peer: Peer) -> list[Figure]:
    """The peer's times over ours, medians of a round's ratios, then what they are made of."""
    rounds, made = peer.rounds, []
    for kind, limit in zip(KINDS, LIMITS[peer.name], strict=True):
        ratio = statistics.median(rounds.ratios[kind])
        made.append(at_least(f"{kind}_vs_{peer.name}", ratio, limit))
    for kind in KINDS:
        values = [seconds * 1e3 for seconds in rounds.seconds[kind]]
        spread = f"{min(values):.4g} to {max(values):.4g}"
        made.append(Figure(f"{peer.name}_{kind}_ms", statistics.median(values), "ms", spread))
    share = statistics.mean(peer.agreed)
    return [*made, Figure(f"{peer.name}_same_first_token", share, "", f"of {len(peer.agreed)}")]


def notes(peers: Sequence[Peer]) -> list[str]:
    """A line for each peer: what it ran in, or that it was left out."""
    ran = {peer.name: peer for peer in peers}
    lines = []
    for name in LIMITS:
        if name in ran:
            facts = ", ".join(f"{what} {value}" for what, value in ran[name].facts.items())
            lines.append(f"{name}: {facts}")
        else:
            lines.append(f"*_vs_{name} left out: give --{name} PYTHON (benchmarks/peers/README.md)")
    return lines
