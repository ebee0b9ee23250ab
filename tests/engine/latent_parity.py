"""The kernels of latent attention against the same in float64, on any device.

    TRITON_INTERPRET=1 python -P tests/engine/latent_parity.py --device cpu     what CI runs
    python -P tests/engine/latent_parity.py --device cuda                       on a GPU

As in `attention_parity.py`, a check returns the error of its worst row and the largest that is
allowed, and memory that no kernel may read holds NaN.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from baton.engine.batch import Slice, StepBatch
from baton.engine.decode_buffers import DecodeLimits
from baton.engine.latent import LatentAttention
from baton.engine.latent_triton import TritonLatentAttention
from baton.engine.mixture_spec import LatentSpec
from baton.engine.step_layout import Bounds, lay_out
from baton.engine.triton_decode import Splits, new_partials
from baton.engine.triton_latent import latent_attention

Check = Callable[[torch.device, bool], tuple[float, float]]  # (device, tiny): error, allowed
ALLOWED = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


def latent_check(limits: DecodeLimits, deterministic: bool, dtype: torch.dtype) -> Check:
    """Steps of rows that decode, chunks that are expanded and chunks that are not, by
    `TritonLatentAttention` against `LatentAttention` in float64."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        spec = LatentSpec(
            rank=24 if tiny else 512,
            rope_dim=8 if tiny else 64,
            plain_dim=16 if tiny else 128,
            value_dim=8 if tiny else 128,
            query_rank=None,
            interleaved=False,
        )
        heads, scale = (3, 0.3) if tiny else (128, 0.07)
        blocks, size, worst = 30, 8, 0.0
        up = (torch.randn(heads, spec.plain_dim + spec.value_dim, spec.rank) * 0.2).to(dtype)
        pool = torch.full((blocks, 1, 2, size, spec.width), float("nan"), dtype=dtype)
        theirs = LatentAttention(_pool(pool.double()), spec, heads, scale)
        ours = TritonLatentAttention(
            _pool(pool.to(device)), spec, heads, scale, limits, deterministic=deterministic
        )
        order = torch.randperm(blocks).tolist()
        cut = (order[:5], order[5:8], order[8:12])
        for slices in (
            (Slice([1] * 33, 0, cut[0]), Slice([1], 0, cut[1])),
            (Slice([1] * 3, 33, cut[0]), Slice([1], 1, cut[1]), Slice([1] * 25, 0, cut[2])),
            (Slice([1], 36, cut[0]), Slice([1], 2, cut[1]), Slice([1], 25, cut[2])),
        ):
            layout = lay_out(StepBatch(slices), Bounds(blocks, size, 9, 500))
            rows = len(layout.tokens)
            for layer in range(2):
                queries = torch.randn(rows, heads, spec.query_dim).to(dtype)
                latents = torch.randn(rows, spec.width).to(dtype)
                theirs.write(layer, latents.double(), layout)
                wanted = theirs.attend(layer, queries.double(), up.double(), layout)
                ours.write(layer, latents.to(device), layout)
                found = ours.attend(layer, queries.to(device), up.to(device), layout)
                worst = max(worst, error(found.cpu(), wanted))
        same = torch.equal(ours._pool.tensor.cpu().isnan(), theirs._pool.tensor.isnan())
        return worst if same else float("inf"), ALLOWED[dtype]

    return run


def latent_batch_check(device: torch.device, tiny: bool) -> tuple[float, float]:
    """Deterministic: a row's result is the same bits alone and in a chunk."""
    heads, rank, width, size = (3, 24, 32, 8) if tiny else (128, 512, 576, 16)
    dtype = torch.float32 if tiny else torch.bfloat16
    pool = torch.randn(8, size, width).to(device, dtype)
    tables = torch.randperm(8, dtype=torch.int32).view(1, 8).to(device)
    queries = torch.randn(5, heads, width).to(device, dtype)
    lengths = torch.tensor([30, 31, 32, 33, 60], dtype=torch.int32, device=device)
    sequences, outs = torch.zeros(5, dtype=torch.int32, device=device), []
    for rows, programs in ((slice(0, 5), 3), (slice(3, 4), 1)):
        splits = Splits(programs, 32)
        count = len(lengths[rows])
        partials = new_partials(count, heads, splits.capacity(60, 32), rank, device)
        out = torch.full((count, heads, rank), float("nan"), dtype=dtype, device=device)
        given = (queries[rows], pool, tables, sequences[rows], lengths[rows])
        latent_attention(out, *given, splits, partials, 0.1)
        outs.append(out)
    return float((outs[0][3] != outs[1][0]).sum()), 0.0


def one_row_off(check: Check) -> Check:
    """Of a step that is right but for one row, which must be noticed, by far."""

    def run(device: torch.device, tiny: bool) -> tuple[float, float]:
        attend = TritonLatentAttention.attend

        def off(self: Any, *given: Any) -> Tensor:
            out = attend(self, *given)
            out[-1] *= 1.01
            return out

        TritonLatentAttention.attend = off  # type: ignore[method-assign]
        try:
            found, allowed = check(device, tiny)
        finally:
            TritonLatentAttention.attend = attend  # type: ignore[method-assign]
        return allowed / found, 0.1

    return run


def _pool(tensor: Tensor) -> Any:
    """As much of a `KvPool` as attention looks at."""
    return SimpleNamespace(tensor=tensor, dtype=tensor.dtype, block_size=tensor.shape[-2])


def error(out: Tensor, truth: Tensor) -> float:
    """The largest of the rows' errors: one bad row of thousands must not hide among the others.
    NaN counts as infinite."""
    rows, wanted = out.double().flatten(1), truth.double().flatten(1)
    worst = (rows - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    return worst.max().item() if worst.isfinite().all() else float("inf")


CHECKS: dict[str, Check] = {}
CHECKS["latent step, splits by count"] = latent_check(DecodeLimits(3, 500), False, torch.float32)
CHECKS["latent step, fixed splits"] = latent_check(DecodeLimits(40, 500, 32), True, torch.float32)
CHECKS["latent step, bfloat16"] = latent_check(DecodeLimits(8, 500), False, torch.bfloat16)
CHECKS["latent step, one row that is off is noticed"] = one_row_off(
    latent_check(DecodeLimits(3, 500), False, torch.float32)
)
CHECKS["latent rows, bits do not depend on the batch"] = latent_batch_check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--only", default="", metavar="TEXT", help="checks with TEXT in the name")
    parser.add_argument("--json", metavar="FILE", help="write the results there too")
    given = parser.parse_args()
    results = []
    for name, check in CHECKS.items():
        if given.only in name:
            torch.manual_seed(len(name))
            found, allowed = check(torch.device(given.device), given.device == "cpu")
            said = f"error {found:.2e}, allowed {allowed:.0e}"
            results.append({"name": name, "good": found <= allowed, "error": found, "said": said})
            print(f"{'ok' if found <= allowed else 'WRONG':6} {name}: {said}", flush=True)
    if given.json:
        with open(given.json, "w") as file:
            json.dump(results, file)
    return 0 if results and all(result["good"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
