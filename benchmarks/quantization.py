"""Measure the error and the time of quantised weights, form by form, against bf16.

python -m benchmarks.quantization [--json FILE]

    product_error_FORM     of a matrix product, relative (norm over norm): normal weights, 4096^2
    logits_error_FORM      of a random model's logits over 256 tokens, against its bf16 weights
    ms_FORM_ROWS           of that product for 1, 8, 32 and 512 rows; bf16 is the CPU backend's

Times are the processor time of one thread, so that neighbours disturb them little: medians of
interleaved rounds, over several matrices in turn. The model: Qwen3-shaped, 8 layers of 512.
What KV in eight bits costs: `benchmarks.quantized_kv`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from baton.engine.model.quantized_weight import QuantizedWeight, quantize_int4, quantize_int8
from baton.engine.scheduling.batch import Slice, StepBatch
from baton.models.random_model import make_shaped_model
from benchmarks.figures.report import Figure, parser, report

SIZE = 4096
COPIES = 4
ROUNDS = 7
ROWS = (1, 8, 32, 512)
TOKENS = 256
FP8_MOST = 448.0


def fp8_rows(weight: Tensor) -> QuantizedWeight:
    scales = weight.float().abs().amax(dim=1, keepdim=True) / FP8_MOST
    codes = (weight.float() / scales).to(torch.float8_e4m3fn)
    return QuantizedWeight("fp8", codes, scales, weight.shape[1])


def fp8_blocks(weight: Tensor) -> QuantizedWeight:
    codes, scales = _in_blocks(weight)
    return QuantizedWeight("fp8", codes, scales.repeat_interleave(128, dim=0), 128)


FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": quantize_int8,
    "int4_g128": lambda weight: quantize_int4(weight, 128),
    "int4_g64": lambda weight: quantize_int4(weight, 64),
    "int4_g32": lambda weight: quantize_int4(weight, 32),
    "fp8_rows": fp8_rows,
    "fp8_blocks": fp8_blocks,
}


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 codes and scales of blocks of 128 x 128, whose sizes divide the matrix's."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MOST
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(rows, columns), scales


def product_figures() -> list[Figure]:
    plain = [torch.randn(SIZE, SIZE).to(torch.bfloat16) for _ in range(COPIES)]
    x = torch.randn(max(ROWS), SIZE).to(torch.bfloat16)
    wanted = x[:32].float() @ plain[0].float().T
    matrices = CpuBackend().matrices(torch.bfloat16)
    products: dict[str, list[Any]] = {"bf16": [matrices.plain(weight) for weight in plain]}
    for name, form in FORMS.items():
        products[name] = [matrices.quantized(form(weight), None, weight.dtype) for weight in plain]
    errors = [
        Figure(f"product_error_{name}", error(made[0](x[:32]), wanted))
        for name, made in products.items()
    ]
    taken: dict[tuple[str, int], list[float]] = {}
    for turn in range(ROUNDS + 1):
        for rows in ROWS:
            for name, made in products.items():
                begun = time.thread_time()
                made[turn % COPIES](x[:rows])
                if turn:  # the first compiles and warms up
                    taken.setdefault((name, rows), []).append(time.thread_time() - begun)
    times = [
        Figure(f"ms_{name}_{rows}", 1e3 * statistics.median(seconds), "ms")
        for (name, rows), seconds in sorted(taken.items(), key=lambda item: item[0][1])
    ]
    return errors + times


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def small_model(folder: Path) -> Path:
    return make_shaped_model(
        folder,
        layers=8,
        hidden=512,
        heads=8,
        kv_heads=4,
        head_dim=64,
        ffn=1536,
        vocab=8192,
        dtype="bfloat16",
        seed=0,
    )


def logits_figures(folder: Path) -> list[Figure]:
    plain = small_model(folder / "bf16")
    wanted = _logits(plain)
    exact = _logits(plain, dtype="float32")
    figures = [Figure("logits_error_bf16", error(wanted, exact), "", "against float32")]
    for made in ("int8", "int4"):
        found = _logits(plain, quantization=made)
        figures.append(Figure(f"logits_error_{made}", error(found, wanted)))
    found = _logits(_as_fp8(plain, folder / "fp8"))
    return [*figures, Figure("logits_error_fp8_blocks", error(found, wanted))]


def _logits(folder: Path, dtype: str = "bfloat16", quantization: str = "none") -> Tensor:
    runner = build_runner(folder, EngineOptions(blocks=17, dtype=dtype, quantization=quantization))
    tokens = [(7919 * index + 13) % 4000 for index in range(TOKENS)]
    return runner.all_logits(StepBatch((Slice(tokens, 0, list(range(16))),)))[0]


def _as_fp8(source: Path, target: Path) -> Path:
    """The same model with its matrices in DeepSeek's form."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scales = _in_blocks(tensors[name])
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (target / "config.json").write_text(json.dumps(config))
    return target


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        figures = logits_figures(Path(folder))
    report([*figures, *product_figures()], options.json)


if __name__ == "__main__":
    main()
