"""Observe a READ after the release of its handle. An experiment on NIXL over UCX.

    python -m benchmarks.figures.released_read [--json FILE]

A peer is paused (SIGSTOP) around a READ from it; the READ is left unfinished (polled on, handle
released, or released and the peer removed), its destination is reused (filled with a marker), the
peer goes on (SIGCONT), and the destination is watched. Bytes that are no longer the marker were
written by a READ that no task waited for. In the way `killed`, the paused peer is killed and the
READ polled to its error; what is written afterwards is watched in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from baton.kv_transfer.nixl_library import load_bindings
from baton.kv_transfer.preflight import described

TRANSPORTS = {"default": "", "tcp": "tcp"}
WAYS = ("polled", "released", "peer_removed", "killed")
PAUSES = ("before_first_contact", "before_the_read", "during_the_read")
BLOCKS = 64
BLOCK_BYTES = 1 << 20
MARKER = 0xEE  # the peer's blocks hold 1 to 64
WATCH_S = 1.5


class Scene:
    """One peer process, one agent, one pool; used once."""

    def __init__(self) -> None:
        self.peer = subprocess.Popen(
            [sys.executable, "-m", "baton.kv_transfer.preflight", "--serve"]
            + ["--blocks", str(BLOCKS), "--block-bytes", str(BLOCK_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.peer.stdout is not None
        pool = described(next(line for line in self.peer.stdout if line.startswith("{")))
        bindings = load_bindings()
        self.agent = bindings.nixl_agent(
            f"reader-{time.monotonic_ns()}",
            bindings.nixl_agent_config(backends=[], enable_prog_thread=False),
        )
        self.agent.create_backend("UCX", {})
        self.own = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.own[:] = 255  # every page is there before anything is timed
        base = self.own.ctypes.data
        self.agent.register_memory([(base, self.own.nbytes, 0, "")], "DRAM")
        self.name = self.agent.add_remote_agent(pool.metadata)
        shape = [BLOCK_BYTES, 0, BLOCK_BYTES, BLOCKS]
        self.local = self._prepare("NIXL_INIT_AGENT", [base, *shape])
        self.remote = self._prepare(self.name, [pool.base_address, *shape])

    def _prepare(self, name: Any, row: list[int]) -> Any:
        return self.agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), "DRAM")

    def post(self, blocks: int) -> tuple[Any, str]:
        index = np.arange(blocks, dtype=np.int32)
        handle = self.agent.make_prepped_xfer("READ", self.local, index, self.remote, index)
        return handle, self.agent.transfer(handle)

    def poll(self, handle: Any, seconds: float) -> tuple[str, float]:
        """State after at most `seconds`, and the seconds it took."""
        begun = time.monotonic()
        state = "PROC"
        while state == "PROC" and time.monotonic() - begun < seconds:
            try:
                state = self.agent.check_xfer_state(handle)
            except Exception as error:  # what NIXL raises is the finding
                state = type(error).__name__
        return state, time.monotonic() - begun

    def progress(self, seconds: float) -> None:
        """Let UCX work, without touching the READ."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            self.agent.get_new_notifs()

    def landed(self, background: int) -> int:
        """Bytes of the destination that are not `background`."""
        return int((self.own != background).sum())

    def pause(self, paused: bool) -> None:
        self.peer.send_signal(signal.SIGSTOP if paused else signal.SIGCONT)

    def end(self) -> None:
        if self.peer.poll() is None:
            self.pause(False)
            self.peer.kill()
        self.peer.wait()


def leave(scene: Scene, handle: Any, way: str) -> str:
    """Abandon a READ in one of the ways; what NIXL said to it."""
    if way == "polled":
        return "kept"
    try:
        handle.release()
        if way == "peer_removed":
            scene.remote.release()
            scene.agent.remove_remote_agent(scene.name)
    except Exception as error:  # what NIXL raises is the finding
        return f"{type(error).__name__}: {error}"
    return "ok"


def left(scene: Scene, handle: Any, way: str) -> dict[str, Any]:
    """Leave a READ, reuse its destination, let the peer go on."""
    result: dict[str, Any] = {"leaving": leave(scene, handle, way)}
    scene.own[:] = MARKER
    scene.progress(0.5)
    result["bytes_written_after_reuse_while_paused"] = scene.landed(MARKER)
    scene.pause(False)
    scene.progress(WATCH_S)
    result["bytes_written_after_reuse_and_continue"] = scene.landed(MARKER)
    if way == "polled":
        result["final_state"], _ = scene.poll(handle, 5.0)
        scene.own[:] = MARKER
        scene.progress(0.5)
        result["bytes_written_after_done"] = scene.landed(MARKER)
    return result


def killed(scene: Scene, handle: Any) -> dict[str, Any]:
    """Kill the peer, poll the READ to its error, reuse the destination."""
    scene.peer.kill()
    state, seconds = scene.poll(handle, 10.0)
    scene.own[:] = MARKER
    scene.progress(0.5)
    return {
        "final_state": state,
        "error_after_s": round(seconds, 3),
        "bytes_written_after_error": scene.landed(MARKER),
    }


def experiment(pause: str, way: str) -> dict[str, Any]:
    """One READ around a pause of its peer, left in one way."""
    scene = Scene()
    try:
        if pause != "before_first_contact":
            warm, _ = scene.post(1)
            scene.poll(warm, 5.0)
        scene.own[:] = 255
        if pause != "during_the_read":
            scene.pause(True)
            handle, state = scene.post(BLOCKS)
        else:
            handle, state = scene.post(BLOCKS)
            state, _ = (state, 0.0) if state == "DONE" else scene.poll(handle, 0.01)
            scene.pause(True)
        if state == "PROC":
            state, _ = scene.poll(handle, 1.0)
        result: dict[str, Any] = {
            "pause": pause,
            "way": way,
            "state_while_paused": state,
            "bytes_landed_while_paused": scene.landed(255),
        }
        if state == "PROC":
            result |= killed(scene, handle) if way == "killed" else left(scene, handle, way)
        return result
    finally:
        scene.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    parser.add_argument("--one", nargs=2, metavar=("PAUSE", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(experiment(*args.one)), flush=True)
        os._exit(0)  # a released READ may crash the teardown: not what is asked here
    results = []
    for transport, tls in TRANSPORTS.items():
        for pause in PAUSES:
            for way in WAYS:
                environment = os.environ | ({"UCX_TLS": tls} if tls else {})
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.figures.released_read", "--one", pause, way],
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
                lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
                outcome = json.loads(lines[-1]) if lines else {"error": done.stderr[-300:]}
                results.append({"transport": transport, "pause": pause, "way": way} | outcome)
                print(json.dumps(results[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"block_bytes": BLOCK_BYTES, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
