"""What runs parity checks tells what is wrong, and stops at nothing."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

CPU = torch.device("cpu")


def test_every_check_is_run_and_reported(
    parity: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def good(device, tiny):
        seen.append((device, tiny, torch.rand(1).item()))
        return 0.5, 1.0

    checks = {"good": good, "wrong": lambda device, tiny: (2.0, 1.0), "none": lambda *_: 1 / 0}
    results = parity.run_checks(checks, CPU, True)
    assert [(each["name"], each["good"]) for each in results] == [
        ("good", True),
        ("wrong", False),
        ("none", False),
    ]
    assert "WRONG  wrong: error 2.00e+00, allowed 1.00e+00" in capsys.readouterr().out
    assert "ZeroDivisionError" in results[2]["said"]
    parity.run_checks(checks, CPU, True, "oo")
    assert len(seen) == 2 and seen[0] == seen[1]  # the same random inputs
    assert parity.run_checks(checks, CPU, True, "no such name") == []


def test_a_number_that_is_none_is_no_success(parity: ModuleType) -> None:
    assert not parity.run_checks({"nan": lambda *_: (float("nan"), 1.0)}, CPU, True)[0]["good"]


def test_the_worst_row_is_what_counts(parity: ModuleType) -> None:
    truth = torch.eye(3) * 4
    out = truth.clone()
    out[1, 1] = 5.0
    assert parity.error(truth, truth) == 0
    assert parity.error(out, truth) == pytest.approx(0.25)
    out[2, 0] = float("nan")
    assert parity.error(out, truth) == float("inf")


def test_a_mistake_must_be_seen_by_far(parity: ModuleType) -> None:
    for found, noticed in ((1.0, True), (1e-6, False), (0.0, False)):
        error, allowed = parity.noticed(lambda *_, found=found: (found, 2e-6))(CPU, True)
        assert (error <= allowed) is noticed


def test_every_script_is_known(parity: ModuleType) -> None:
    scripts = {path.stem for path in Path(parity.__file__).parent.glob("*_parity.py")}
    found = {name.removesuffix("_parity") for name in scripts if not name.startswith("test_")}
    assert found == set(parity.NAMES)
