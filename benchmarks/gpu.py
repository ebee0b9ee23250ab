"""All that is to be known of the engine on this GPU, in one run of at most nine minutes.

    python -m benchmarks.gpu --json FILE [--table FILE] [--reference FOLDER] [--only PART ...]
    TRITON_INTERPRET=1 python -m benchmarks.gpu --dry-run      the same code, tiny, on a CPU

First parity: every kernel against its reference, then whole models against the CPU. Then
speed, beside the ceilings of the same run, and real workers on this GPU. Each part is a process
of its own, with a limit of its own: one that fails, hangs or breaks the device's context stops
no other, and is told by the exit code. Needs torch, triton, numpy and safetensors; what else is
absent is skipped by name.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Figure, command, machine

FOLDER = Path(__file__).resolve().parent.parent
TESTS = FOLDER / "tests" / "engine"
SCRIPTS: dict[str, tuple[float, list[str]]] = {  # limit in seconds, file and arguments
    "kernel_parity": (58, ["parity.py", "triton"]),
    "attention_parity": (32, ["parity.py", "attention"]),
    "codes_parity": (28, ["parity.py", "codes"]),
    "latent_parity": (21, ["parity.py", "latent"]),
    "fixed_parity": (16, ["parity.py", "fixed"]),
}
ENGINE_PARITY_S, DETERMINISTIC_S = 37.0, 36.0
HANDOFF_S, CHECKSUM_S, WORKERS_S = 23.0, 18.0, 50.0
ORDER = (
    "kernel_parity",
    "attention_parity",
    "codes_parity",
    "latent_parity",
    "fixed_parity",
    "engine_parity",
    "deterministic",
    "ceilings",
    "llama_prefill",
    "llama_decode",
    "qwen_decode",
    "attention",
    "handoff",
    "checksum",
    "workers",
    "transformers_floor",
)
TOTAL_S = 538.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`state`: passed, failed, skipped or timed out; `said` names why."""

    part: str
    state: str
    seconds: float
    figures: list[dict[str, Any]]
    said: str = ""


def main() -> int:
    given = _arguments()
    if given.part:
        return _child(given)
    device = "cpu" if given.dry_run else "cuda"
    if given.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        print("a dry run is for Triton's interpreter: set TRITON_INTERPRET=1")
        return 2
    begun = time.monotonic()
    outcomes: list[Outcome] = []
    with TemporaryDirectory() as folder:
        for part in ORDER:
            if given.only and part not in given.only:
                continue
            left = TOTAL_S - (time.monotonic() - begun)
            limit = 600.0 if given.dry_run else min(_limit(part), left)
            outcomes.append(_run(part, limit, device, Path(folder), given, outcomes))
            _tell(outcomes[-1])
    content = {
        "command": command(),
        "machine": machine() | _gpu(),
        "seconds": round(time.monotonic() - begun, 1),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    if given.json is not None:
        given.json.write_text(json.dumps(content, indent=2) + "\n")
    table = _table(outcomes)
    if given.table is not None:
        given.table.write_text(table)
    print(table)
    bad = [x.part for x in outcomes if x.state in ("failed", "timed out")]
    print(f"{time.monotonic() - begun:.0f} s; " + (f"failed: {', '.join(bad)}" if bad else "done"))
    return 1 if bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="others' figures")
    parser.add_argument("--only", nargs="*", choices=ORDER, metavar="PART", help=", ".join(ORDER))
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--part", choices=ORDER, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--known", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def _limit(part: str) -> float:
    if part in SCRIPTS:
        return SCRIPTS[part][0]
    fixed = {
        "engine_parity": ENGINE_PARITY_S,
        "deterministic": DETERMINISTIC_S,
        "handoff": HANDOFF_S,
        "checksum": CHECKSUM_S,
        "workers": WORKERS_S,
    }
    if part in fixed:
        return fixed[part]
    return {
        "ceilings": 22.0,
        "llama_prefill": 42.0,
        "llama_decode": 42.0,
        "qwen_decode": 44.0,
        "attention": 45.0,
        "transformers_floor": 24.0,
    }[part]


def _run(
    part: str,
    limit_s: float,
    device: str,
    folder: Path,
    given: argparse.Namespace,
    before: list[Outcome],
) -> Outcome:
    out = folder / f"{part}.json"
    if part in SCRIPTS:
        script, *more = SCRIPTS[part][1]
        line = [sys.executable, "-P", str(TESTS / script), *more, f"--device={device}"]
    else:
        known = {each["name"]: each["value"] for done in before for each in done.figures}
        line = [sys.executable, "-m", "benchmarks.gpu", f"--part={part}", f"--out={out}"]
        line += [f"--known={json.dumps(known)}"]
        line += ["--dry-run"] if given.dry_run else []
        line += [f"--reference={given.reference}"] if given.reference else []
    print(f"== {part} (at most {limit_s:.0f} s)", flush=True)
    begun = time.monotonic()
    state, said = "passed", ""
    child = subprocess.Popen(line, cwd=FOLDER, start_new_session=True)
    try:
        code = child.wait(max(limit_s, 1.0))
        if code:
            state, said = "failed", f"exit code {code}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)  # its own children too
        child.wait()
        state, said = "timed out", f"after {limit_s:.0f} s"
    found = json.loads(out.read_text()) if out.exists() else {}
    if "skipped" in found:
        state, said = "skipped", found["skipped"]
    return Outcome(part, state, round(time.monotonic() - begun, 1), found.get("figures", []), said)


def _child(given: argparse.Namespace) -> int:
    import torch

    from benchmarks.gpu_speed import Given, Skipped

    device = torch.device("cpu" if given.dry_run else "cuda")
    torch.manual_seed(0)
    known = Given(device, given.dry_run, given.reference, json.loads(given.known))
    try:
        figures = _function(given.part)(known)
    except Skipped as skipped:
        given.out.write_text(json.dumps({"skipped": str(skipped)}))
        return 0
    except Exception:  # told here, and by the exit code
        traceback.print_exc()
        return 1
    given.out.write_text(json.dumps({"figures": [asdict(figure) for figure in figures]}))
    return 0


def _function(part: str) -> Callable[[Any], list[Figure]]:
    from benchmarks import gpu_deterministic, gpu_handoff, gpu_speed, gpu_workers

    if part == "engine_parity":
        return _engine_parity
    if part == "deterministic":
        return gpu_deterministic.deterministic
    if part == "workers":
        return gpu_workers.workers
    return getattr(gpu_speed, part, None) or getattr(gpu_handoff, part)  # type: ignore[no-any-return]


def _engine_parity(given: Any) -> list[Figure]:
    """Greedy and drawn tokens of small float32 models: graphs and kernels against the CPU, with
    KV in eight bits too."""
    from benchmarks.gpu_small_model import write_small_model

    equal = []
    with TemporaryDirectory() as folder:
        for qk_norm, kv_dtype in ((False, "auto"), (True, "auto"), (False, "int8")):
            model = Path(folder) / f"model{qk_norm:d}"
            write_small_model(model, qk_norm)
            line = [sys.executable, "-P", str(TESTS / "device_story.py"), str(model)]
            line += [f"--device={given.device.type}", f"--steps={2 if given.dry else 24}"]
            line += [f"--kv-dtype={kv_dtype}", *(["--sized"] if qk_norm else [])]
            done = subprocess.run(line, stdout=subprocess.PIPE, text=True, timeout=300)
            if done.returncode not in (0, 1) or not done.stdout:
                raise RuntimeError(f"{line} ended with {done.returncode}")
            equal += json.loads(done.stdout)
    if not all(equal):
        raise RuntimeError(f"sequences equal to the CPU's: {equal}")
    return [Figure("sequences_equal_to_the_cpu", float(sum(equal)), "", f"of {len(equal)}")]


def _tell(outcome: Outcome) -> None:
    print(f"-- {outcome.part}: {outcome.state} {outcome.said} ({outcome.seconds} s)")
    for each in outcome.figures:
        print(f"   {each['name']} {each['value']:.4g} {each['unit']} {each['beside']}", flush=True)


def _gpu() -> dict[str, str]:
    try:
        import torch
        import triton
    except ImportError:
        return {}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": name, "triton": triton.__version__}


def _table(outcomes: list[Outcome]) -> str:
    lines = ["| part | figure | value | beside | holds |", "| --- | --- | --- | --- | --- |"]
    for outcome in outcomes:
        if outcome.state != "passed" or not outcome.figures:
            lines.append(f"| {outcome.part} | | {outcome.state} | {outcome.said} | |")
        for each in outcome.figures:
            holds = {None: "", True: "yes", False: "no"}[each["holds"]]
            value = f"{each['value']:.4g} {each['unit']}".strip()
            lines.append(
                f"| {outcome.part} | {each['name']} | {value} | {each['beside']} | {holds} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
