"""The deterministic mode of a device, on a small random model: the same bits however it is served.

    TRITON_INTERPRET=1 python -P tests/engine/deterministic_story.py FOLDER --device cpu
    python -P tests/engine/deterministic_story.py FOLDER --device cuda

FOLDER holds a model. Prints one JSON object: what was checked, and whether it held.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution import determinism_proof
from baton.engine.execution.cuda_runner import CudaRunner
from baton.engine.execution.determinism_proof import prove_graphs
from baton.engine.execution.device_runner import device_runner
from baton.engine.memory.kv_pool import KvPool
from baton.engine.memory.kv_quant import KV_QUANTS
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.quantization_config import LOAD_QUANTIZATIONS
from baton.engine.triton.matrices import TritonMatrices
from baton.runtime.errors import ConfigError

sys.path.append(str(Path(__file__).parent))
from device_story import BLOCKS, torch_runner
from interpreter import patch_once_a_launch, shorten_proof

SIZE = 8
Sizes = tuple[int, ...]


def logits(runner: CudaRunner, *slices: Slice) -> list[Tensor]:
    return [found.cpu() for found in runner.all_logits(StepBatch(slices))]


def shared_prefix(
    runner: CudaRunner, tokens: list[int], donor_cuts: Sizes, cuts: Sizes
) -> tuple[Tensor, bool]:
    """Logits of the tokens in one step, and whether they are those after blocks that another
    sequence computed, in other chunks and beside others."""
    free = list(range(BLOCKS))[::-1]
    count = -(-len(tokens) // SIZE)
    own, donor, other = ([free.pop() for _ in range(count)] for _ in range(3))
    (whole,) = logits(runner, Slice(tokens, 0, own))
    kept = max(1, len(tokens) // SIZE // 2) * SIZE  # tokens of the shared blocks
    for start, end in zip((0, *donor_cuts), (*donor_cuts, kept), strict=True):
        beside = Slice(tokens[::-1][: 1 + end % 5], 0, other)
        logits(runner, beside, Slice(tokens[start:end], start, donor))
    table = [*donor[: kept // SIZE], *[free.pop() for _ in range(count - kept // SIZE)]]
    same = True
    for start, end in zip((kept, *cuts), (*cuts, len(tokens)), strict=True):
        found = logits(runner, Slice(tokens[start:end], start, table))[0]
        same = same and torch.equal(found, whole[start:end])
    return whole, same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", *KV_QUANTS))
    parser.add_argument("--quantization", default="none", choices=LOAD_QUANTIZATIONS)
    parser.add_argument("--ordinary", action="store_true", help="the other mode is refused, too")
    given = parser.parse_args()
    patch_once_a_launch()
    device, tiny = torch.device(given.device), given.device == "cpu"
    if tiny:
        shorten_proof(SIZE)
    spec, codes = read_spec(given.folder), KV_QUANTS.get(given.kv_dtype)
    weights = load_weights(
        given.folder, spec, torch.float32, TritonMatrices(device), None, given.quantization
    )
    build = partial(device_runner, spec, weights, max_rows=8, max_context=128)
    new_pool = partial(KvPool, spec, BLOCKS, SIZE, torch.float32, device, codes)
    ours = build(new_pool(), buckets=(4,) if tiny else (1, 2, 8), deterministic=True)
    held = {"proved": len(prove_graphs(ours)) == 32}
    tokens = [(31 * index + 7) % spec.vocab_size for index in range(18 if tiny else 120)]
    cuts = ((5,), (17,)) if tiny else ((5, 6, 40), (57, 90, 91))
    found, held["from a shared prefix"] = shared_prefix(ours, tokens, *cuts)
    plain = torch_runner(given.folder, given.kv_dtype, given.quantization, SIZE)
    (wanted,) = plain.all_logits(StepBatch((Slice(tokens, 0, range(BLOCKS // 2)),)))
    apart = ((found - wanted).norm() / wanted.norm()).item()
    held["near the CPU's"] = apart < (2e-2 if codes else 1e-4)
    if given.ordinary:
        if tiny:
            determinism_proof.PROOF_TOKENS = determinism_proof.SIZES_TOKENS = 4
        try:
            prove_graphs(build(new_pool(), buckets=()))
            held["the ordinary mode is refused"] = False
        except ConfigError:
            held["the ordinary mode is refused"] = True
    print(json.dumps(held | {"apart": apart}))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
