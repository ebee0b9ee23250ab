"""Runs the parity checks of scripts beside this one, on a GPU or in Triton's interpreter.

    TRITON_INTERPRET=1 python -P tests/engine/parity.py attention --device cpu   what CI runs
    python -P tests/engine/parity.py attention --device cuda                     in `make gpu`

The checks are CHECKS of `attention_parity.py`. A check makes fresh random inputs, and returns its
error and the largest one that is allowed; one that raises stops no other.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

NAMES = ("triton", "draw", "attention", "step", "codes", "latent", "fixed")
Check = Callable[[torch.device, bool], tuple[float, float]]  # (device, tiny): error, allowed


def error(out: Tensor, truth: Tensor) -> float:
    """The largest of the rows' errors, the norm of the difference over that of the truth: one bad
    row of thousands must not hide among the others. NaN counts as infinite."""
    rows, wanted = out.double().flatten(1).cpu(), truth.double().flatten(1).cpu()
    worst = (rows - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    return worst.max().item() if worst.isfinite().all() else float("inf")


def noticed(check: Check) -> Check:
    """Of a check that computes something slightly wrong: it must fail, by far."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        found, allowed = check(device, tiny)
        return (allowed + 1e-3) / max(found, 1e-9), 0.2

    return run


def run_checks(
    checks: Mapping[str, Check], device: torch.device, tiny: bool, named: str = ""
) -> list[dict[str, object]]:
    """Every check whose name contains `named`, printed as it ends."""
    results: list[dict[str, object]] = []
    for name, check in checks.items():
        if named not in name:
            continue
        torch.manual_seed(len(name))
        begun = time.perf_counter()
        try:
            found, allowed = check(device, tiny)
            good, said = found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}"
        except Exception as failure:  # reported with the others, and by the exit code
            traceback.print_exc()
            found, good, said = float("inf"), False, f"{type(failure).__name__}: {failure}"
        seconds = time.perf_counter() - begun
        print(f"{'ok    ' if good else 'WRONG '} {name}: {said} ({seconds:.2f} s)", flush=True)
        results.append({"name": name, "good": good, "error": found, "said": said})
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="+", choices=NAMES, help="names, without _parity.py")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in the name")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    sys.modules["parity"] = sys.modules["__main__"]  # what the scripts import
    sys.path.append(str(Path(__file__).parent))
    checks: dict[str, Check] = {}
    for script in given.scripts:
        more = importlib.import_module(f"{script}_parity").CHECKS
        if twice := checks.keys() & more.keys():
            parser.error(f"two of the scripts have checks of one name: {', '.join(sorted(twice))}")
        checks |= more
    importlib.import_module("interpreter").patch_once_a_launch()
    results = run_checks(checks, torch.device(given.device), given.device == "cpu", given.only)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(results, file)
    return 0 if results and all(result["good"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
