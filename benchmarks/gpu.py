"""All that is to be known of the engine on this GPU, in one run of at most nine minutes.

    python -m benchmarks.gpu --results FOLDER [--reference FOLDER] [--only PART ...]
    TRITON_INTERPRET=1 python -m benchmarks.gpu --dry-run      the same code, tiny, on a CPU

First a smoke test: a launch, a capture, a READ. Then parity: every kernel against its reference
and whole models against the CPU, side by side.
Then speed, beside the ceilings of the same run, and real workers on this GPU. Each part is a
process of its own, and has what time those after it do not need: one that fails, hangs or breaks
the device's context stops no other, keeps its figures and sets the exit code.
After each part FOLDER holds all that is known: gpu.json, gpu.md and gpu.log.
Needs torch, triton, numpy and safetensors; what else is absent is skipped by name.
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.figures.report import Figure, command, machine

FOLDER = Path(__file__).resolve().parent.parent
TESTS = FOLDER / "tests" / "engine"
SCRIPTS = {  # file and arguments
    "kernel_parity": ["parity.py", "triton"],
    "draw_parity": ["parity.py", "draw"],
    "attention_parity": ["parity.py", "attention"],
    "step_parity": ["parity.py", "step"],
    "codes_parity": ["parity.py", "codes"],
    "latent_parity": ["parity.py", "latent"],
    "fixed_parity": ["parity.py", "fixed"],
}
# Side by side, since most of their time goes to compiling, one kernel after another on one core.
PARITY = (*SCRIPTS, "engine_parity")  # they have what the others leave: over two minutes
SMOKE = "smoke"  # before all others
SMOKE_S = 15.0
LIMITS = {  # seconds; in the order in which they run, each alone on the device
    "ceilings": 10.0,
    "llama_prefill": 20.0,
    "llama_decode": 20.0,
    "qwen_decode": 24.0,
    "attention": 28.0,
    "draws": 12.0,
    "kv_codes": 26.0,
    "experts": 30.0,
    "speculation": 52.0,
    "deterministic": 40.0,
    "handoff": 18.0,
    "checksum": 10.0,
    "workers": 80.0,
    "transformers_floor": 23.0,
    "ranks": 0.0,  # it needs several GPUs, and gets what all others leave
}
ORDER = (SMOKE, *PARITY, *LIMITS)
TOTAL_S = 528.0  # the last part may take KILL_S more to be gone
KILL_S = 10.0


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
        return run_child(given)
    device = "cpu" if given.dry_run else "cuda"
    if given.dry_run and os.environ.get("TRITON_INTERPRET") != "1":
        print("a dry run is for Triton's interpreter: set TRITON_INTERPRET=1")
        return 2
    begun = time.monotonic() - max(0.0, time.time() - given.begun if given.begun else 0.0)
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends its parts, too
    with TemporaryDirectory() as folder:
        results = given.results or Path(folder)
        results.mkdir(parents=True, exist_ok=True)
        log = results / "gpu.log"
        log.write_bytes(b"")
        for parts in part_groups(given.only or ORDER):
            left = TOTAL_S - (time.monotonic() - begun) - needed_after_s(parts, given.only or ORDER)
            limit = 600.0 if given.dry_run else min(left, SMOKE_S if parts == (SMOKE,) else left)
            outcomes += run_parts(parts, limit, device, Path(folder), given, outcomes, log)
            _write(results, outcomes, time.monotonic() - begun)
    print(figures_table(outcomes))
    bad = [x.part for x in outcomes if x.state in ("failed", "timed out")]
    print(f"{time.monotonic() - begun:.0f} s; " + (f"failed: {', '.join(bad)}" if bad else "done"))
    return 1 if bad else 0


def part_groups(wanted: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the parts that run side by side, in order."""
    parity = tuple(part for part in PARITY if part in wanted)
    first = [(SMOKE,)] if SMOKE in wanted else []
    return [*first, *([parity] if parity else []), *((part,) for part in LIMITS if part in wanted)]


def needed_after_s(parts: tuple[str, ...], wanted: Sequence[str]) -> float:
    """Return the seconds that the parts after `parts` may take."""
    later = list(LIMITS)[list(LIMITS).index(parts[0]) + 1 :] if parts[0] in LIMITS else LIMITS
    return sum(LIMITS[part] for part in later if part in wanted)


def _write(results: Path, outcomes: list[Outcome], seconds: float) -> None:
    """Write the results after each part, so that whatever ends this run leaves what is known."""
    content = {
        "command": command(),
        "machine": machine() | _gpu(),
        "seconds": round(seconds, 1),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    for name, text in (
        ("gpu.json", json.dumps(content, indent=2) + "\n"),
        ("gpu.md", figures_table(outcomes)),
    ):
        made = results / f"{name}.new"
        made.write_text(text)
        made.replace(results / name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="figures, table and log")
    parser.add_argument(
        "--begun", type=float, default=0.0, metavar="SECONDS", help="since 1970: the run's start"
    )
    parser.add_argument("--reference", type=Path, metavar="FOLDER", help="others' figures")
    parser.add_argument("--only", nargs="*", choices=ORDER, metavar="PART", help=", ".join(ORDER))
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--part", choices=ORDER, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--known", default="{}", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_parts(
    parts: tuple[str, ...],
    limit_s: float,
    device: str,
    folder: Path,
    given: argparse.Namespace,
    before: list[Outcome],
    log: Path,
) -> list[Outcome]:
    """Run `parts` side by side. What has not ended by then is killed; its figures so far stay. What
    they say goes to `log`: of one alone as it comes, else of each when it has ended."""
    print(f"== {', '.join(parts)} (at most {limit_s:.0f} s)", flush=True)
    begun = time.monotonic()
    aside = len(parts) > 1
    with log.open("ab") as file:
        file.write(f"== {', '.join(parts)}\n".encode())
    logs = {part: folder / f"{part}.log" if aside else log for part in parts}
    read_from = 0 if aside else log.stat().st_size
    running = {part: _begun(part, device, folder, given, before, logs[part]) for part in parts}
    outcomes = []
    try:
        while running:
            seconds = time.monotonic() - begun
            for part, child in list(running.items()):
                if child.poll() is not None or seconds >= max(limit_s, 1.0):
                    outcomes.append(_outcome(part, child, seconds, limit_s, folder))
                    _tell(outcomes[-1], _said(logs[part], read_from, log))
                    del running[part]
            time.sleep(0.02)  # there is no wait for the first of several children
    finally:  # where this run is interrupted
        for part, child in running.items():
            _state(child, limit_s)
            _said(logs[part], read_from, log)
    return outcomes


def _begun(
    part: str,
    device: str,
    folder: Path,
    given: argparse.Namespace,
    before: list[Outcome],
    log: Path,
) -> subprocess.Popen[bytes]:
    line = _line(part, device, folder, given, before)
    with log.open("ab") as said:
        return subprocess.Popen(
            line, cwd=FOLDER, start_new_session=True, stdout=said, stderr=subprocess.STDOUT
        )


def _said(own: Path, read_from: int, log: Path) -> str:
    """The log of a part; one that had a file of its own is added to the log of all."""
    text = own.read_bytes()[read_from:]
    if own != log:
        with log.open("ab") as file:
            file.write(text)
    return text.decode(errors="replace")


def _outcome(
    part: str, child: subprocess.Popen[bytes], seconds: float, limit_s: float, folder: Path
) -> Outcome:
    """The result of a part that has ended or has no time left."""
    state, said = _state(child, limit_s)
    out = folder / f"{part}.json"
    found = json.loads(out.read_text()) if out.exists() else {}
    if "skipped" in found:
        state, said = "skipped", found["skipped"]
    return Outcome(part, state, round(seconds, 1), found.get("figures", []), said)


def _line(
    part: str, device: str, folder: Path, given: argparse.Namespace, before: list[Outcome]
) -> list[str]:
    """The command line of a part."""
    if part in SCRIPTS:
        script, *more = SCRIPTS[part]
        return [sys.executable, "-P", str(TESTS / script), *more, f"--device={device}"]
    known = {each["name"]: each["value"] for done in before for each in done.figures}
    line = [sys.executable, "-m", "benchmarks.gpu", f"--part={part}"]
    line += [f"--out={folder / part}.json", f"--known={json.dumps(known)}"]
    line += ["--dry-run"] if given.dry_run else []
    return line + ([f"--reference={given.reference}"] if given.reference else [])


def _state(child: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str]:
    """The outcome of a part with its reason; it is killed if it runs."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # its own children too
        try:
            child.wait(KILL_S)
        except subprocess.TimeoutExpired:  # it hangs in the driver; the others may not
            return "timed out", f"after {limit_s:.0f} s, and cannot be ended"
        return "timed out", f"after {limit_s:.0f} s"
    return ("failed", f"exit code {child.returncode}") if child.returncode else ("passed", "")


def run_child(given: argparse.Namespace) -> int:
    """Run one part in this process, write its figures to `given.out`, and return the exit code."""
    import torch

    from benchmarks.gpu_parts.speed import Given, Skipped

    device = torch.device("cpu" if given.dry_run else "cuda")
    torch.manual_seed(0)
    known = Given(device, given.dry_run, given.reference, json.loads(given.known))
    found: dict[str, Any] = {"figures": []}
    try:
        for figure in part_function(given.part)(known):
            found["figures"].append(asdict(figure))
            _keep(given.out, found)
    except Skipped as skipped:
        _keep(given.out, found | {"skipped": str(skipped)})
    except Exception as error:  # any error of a part: the log has it, and the exit code is 1
        traceback.print_exc()
        if missing := _missing_package(error):
            _keep(given.out, found | {"skipped": f"{missing} is not installed"})
        return 0 if missing else 1
    return 0


def _missing_package(error: Exception) -> str:
    """The name of a package that is not installed and is none of ours; empty for another error."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = (name or "").partition(".")[0]
    return "" if package in ("baton", "benchmarks") else package


def _keep(out: Path, found: dict[str, Any]) -> None:
    """Write the file in one replacement: the process may be killed at any time."""
    made = out.with_suffix(".new")
    made.write_text(json.dumps(found))
    made.replace(out)


def part_function(part: str) -> Callable[[Any], Iterable[Figure]]:
    """Return the function of a part, which may yield figures as they come."""
    if part in ("engine_parity", SMOKE):  # they load little
        from benchmarks.gpu_parts import smoke

        return smoke.smoke if part == SMOKE else engine_token_parity
    if part in ("handoff", "checksum", "workers"):  # with NIXL
        from benchmarks.gpu_parts import handoff, workers

        linked = {"handoff": handoff.handoff, "checksum": handoff.checksum}
        return linked.get(part, workers.workers)
    if part == "ranks":
        from benchmarks.gpu_parts import ranks

        return ranks.ranks
    from benchmarks.gpu_parts import deterministic, draws, experts, kv_codes, speculation, speed

    return {
        "ceilings": speed.ceilings,
        "llama_prefill": speed.llama_prefill,
        "llama_decode": speed.llama_decode,
        "qwen_decode": speed.qwen_decode,
        "attention": speed.attention,
        "draws": draws.draws,
        "kv_codes": kv_codes.kv_codes,
        "experts": experts.experts,
        "speculation": speculation.speculation,
        "deterministic": deterministic.deterministic,
        "transformers_floor": speed.transformers_floor,
    }[part]


def engine_token_parity(given: Any) -> Iterable[Figure]:
    """Compare greedy and drawn tokens of small float32 models: graphs and kernels against the CPU,
    with KV in eight bits too."""
    from benchmarks.gpu_parts.small_model import write_small_model

    equal = []
    with TemporaryDirectory() as folder:
        for qk_norm, kv_dtype in ((False, "auto"), (True, "auto"), (False, "int8")):
            model = Path(folder) / f"{kv_dtype}{qk_norm:d}"
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


def _tell(outcome: Outcome, said: str) -> None:
    print(said, end="")
    print(f"-- {outcome.part}: {outcome.state} {outcome.said} ({outcome.seconds} s)")
    for each in outcome.figures:
        print(f"   {each['name']} {each['value']:.4g} {each['unit']} {each['beside']}", flush=True)


@cache
def _gpu() -> dict[str, str]:
    try:
        import torch
        import triton
    except ImportError:
        return {}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": name, "triton": triton.__version__}


def figures_table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a Markdown table."""
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
