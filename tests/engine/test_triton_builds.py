"""Every kernel compiles for sm_80 and sm_90 on a machine that has neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {"_norm", "_gate", "_grouped", "_product", "_unpack", "_sum_parts", "_finish"}
ATTENTION = {"prefill_kernel", "decode_kernel", "latent_kernel"}
KERNELS |= {"scan_kernel", "collect_kernel", "resolve_kernel"}
KERNELS |= {"_adjust", "_logprobs", "fixed_kernel", "grouped_quantized"}
KERNELS |= ATTENTION | {"merge_kernel", "rotate_write_kernel", "write_latents_kernel"}
ON_HOPPER = {80: set(), 90: {"hopper_prefill_kernel"}}
BUILDS = Path(__file__).with_name("triton_builds.py")


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile_and_fit(tmp_path: Path, capability: int) -> None:
    file = tmp_path / "kernels.json"
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", BUILDS, f"--capability={capability}", f"--json={file}"],
        env=inherited | {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert {row["capability"] for row in rows} == {capability}
    assert {row["kernel"] for row in rows} == KERNELS | ON_HOPPER[capability]
    assert all(row["fits"] and row["registers"] > 0 for row in rows)
    # Spilled registers would cost a memory-bound kernel what it is for. Two programs of the
    # prefill kernel share a multiprocessor of Hopper, which is worth a few.
    shared = [row for row in rows if row["kernel"] == "prefill_kernel" and row["registers"] == 128]
    assert len(shared) == (5 if capability == 90 else 0)
    assert [row for row in shared if row["spilled_bytes"] > 96] == []
    assert [row for row in rows if row not in shared and row["spilled_bytes"] > 64] == []
    for row in rows:
        if row["kernel"] == "hopper_prefill_kernel":
            assert row["group_products"] >= 48 and row["engine_copies"] >= 16
        if row["kernel"] not in ATTENTION or "float32" in row["case"]:
            continue
        if " kv, latent" in row["case"]:  # these codes go through registers
            assert row["products"] >= 8
            continue
        # Keys and values pass the registers by, 16 bytes at a time; products are the matrix
        # units' own: on Hopper, of whole warpgroups where the rows suffice.
        assert row["wide_copies"] >= (4 if " kv," in row["case"] else 8)  # of half the bytes
        grouped = capability == 90 and row["kernel"] == "prefill_kernel"
        assert row["group_products" if grouped else "products"] >= 8
