"""The command `baton size`: GPUs, workers and memory for a model and a load. Needs no GPU."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.bench.traffic_options import UNMET_EXIT, positive, read_objectives, write_json
from baton.deploy.cli.arguments import add_command, add_settings, config_of, flags_of
from baton.deploy.serve.flag_values import default_of, new_file, setting, whole
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.deploy.serve.gpu_sizing import Sizing, SizingRequest

TOKEN_UNITS = {"k": 1 << 10, "m": 1 << 20}
DEFAULT_OUTPUT = 512


def add_size(commands: Any) -> None:
    text = "how many GPUs and workers of each role a model needs for some load"
    command = add_command(commands, "size", text, _size)
    command.add_argument(
        "model", metavar="MODEL",
        help="a model folder (config.json is enough) or a hub id (owner/name[@revision])",
    )  # fmt: skip
    command.add_argument("--gpu", required=True, metavar="NAME", help="h200, h100, a100-80gb, ...")
    command.add_argument(
        "--context", type=tokens, required=True, metavar="TOKENS",
        help="length of a request at its end, prompt and output: 8192 or 8k",
    )  # fmt: skip
    command.add_argument(
        "--rps", type=positive, required=True, metavar="X", help="requests that arrive a second"
    )
    command.add_argument(
        "--output", type=tokens, metavar="TOKENS",
        help=f"output tokens of a request (default: {DEFAULT_OUTPUT}, at most half of --context)",
    )  # fmt: skip
    command.add_argument(
        "--slo", metavar="ttft=500ms,itl=40ms", default="",
        help="mean time to the first token, and between tokens, that the workers have to meet",
    )  # fmt: skip
    command.add_argument(
        "--tp", type=whole(1, 64), metavar="N",
        help="GPUs of a worker (default: the fewest that hold the model)",
    )  # fmt: skip
    for option, name, meaning in (
        ("--quantization", "worker.quantization", "quantise the weights while loading"),
        ("--kv-dtype", "pool.kv_dtype", "dtype of the KV cache"),
        ("--dtype", "worker.dtype", "dtype of the weights"),
    ):
        command.add_argument(
            option, type=setting(name), metavar="NAME", help=f"{meaning} ({default_of(name)})"
        )
    command.add_argument(
        "--timing", type=Path, metavar="FILE",
        help="timing model (baton calibrate) of a worker with --tp ranks; default: an estimate",
    )  # fmt: skip
    command.add_argument("--json", type=new_file, metavar="FILE", help="write the report here too")
    add_settings(command)


def tokens(text: str) -> int:
    """Parse a number of tokens: 8192, 8k, 1m."""
    unit = TOKEN_UNITS.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isascii() or not digits.isdigit() or not 0 < int(digits) * unit <= 1 << 24:
        raise argparse.ArgumentTypeError(f"{text!r}: give tokens from 1 to 16m, as 8192 or 8k")
    return int(digits) * unit


def _size(options: argparse.Namespace) -> int:
    from baton.deploy.serve.gpu_sizing import size_fleet

    request = _request(options)
    found = size_fleet(request)
    print("\n".join(_lines(options.model, request, found)))
    if options.json is not None:
        write_json(options.json, _to_json(options.model, request, found))
    return UNMET_EXIT if found.unmet else 0


def _request(options: argparse.Namespace) -> SizingRequest:
    from baton.deploy.serve import hub
    from baton.deploy.serve.device_defaults import on_gpu
    from baton.deploy.serve.gpu_sizing import SizingRequest
    from baton.deploy.serve.model_source import find_model
    from baton.planner.gpu_table import find_gpu
    from baton.planner.sizing import Load
    from baton.planner.timing_file import read_fit
    from baton.runtime.settings.loading import given_names

    gpu = find_gpu(options.gpu)
    output = options.output or min(DEFAULT_OUTPUT, options.context // 2)
    if not 0 < output < options.context:
        raise ConfigError(
            f"--output is {output} of --context {options.context}: a prompt has at least a token; "
            "give a longer --context or a shorter --output"
        )
    if options.timing is not None and options.tp is None:
        raise ConfigError("--timing is of workers with some number of GPUs: name it by --tp")
    objectives = read_objectives(options.slo)
    prompt = options.context - output
    load = Load(options.rps, prompt, output, objectives.ttft_s, objectives.itl_s)
    config = config_of(options)
    given = given_names(options.config, os.environ, flags_of(options))
    model = find_model(
        options.model, lambda line: print(line, file=sys.stderr), files=hub.SHAPE_FILES
    )
    assert model is not None  # nothing stops a download but Ctrl-C
    timing = None if options.timing is None else read_fit(options.timing).model
    return SizingRequest(model.folder, gpu, load, on_gpu(config, given), options.tp or 0, timing)


def _lines(name: str, request: SizingRequest, found: Sizing) -> list[str]:
    load, gpu, plan = request.load, request.gpu, found.memory
    prefill, decode = found.prefill, found.decode
    rows = {
        "model": f"{name}: {found.weights.parameters / 1e9:.2f} billion parameters, {found.dtype}",
        "GPU": f"{gpu.name}: {gpu.memory_gib:g} GiB, {gpu.memory_bytes_per_s / 1e12:g} TB/s, "
        f"{gpu.flops_per_s / 1e12:g} TFLOP/s in bf16; {found.tp} a worker",
        "memory": plan.line(),
        "KV": f"{plan.block_bytes / plan.block_size / 1024:.4g} KiB a token; a pool holds "
        f"{found.sequences:,} sequences of {request.tokens:,} tokens",
        "load": f"{load.requests_per_s:g} a second, of {load.prompt_tokens:,} prompt and "
        f"{load.output_tokens:,} output tokens",
        "timing": found.timing,
        "prefill": f"{_ms(prefill.prompt_s)} a prompt, {prefill.tokens_per_s:,.0f} tokens/s a "
        f"worker; busy {prefill.busy:.0%}; mean TTFT {_ms(prefill.ttft_s)}",
        "decode": f"{_ms(decode.step_s)} a step of {decode.sequences} sequences, at most "
        f"{decode.tokens_per_s:,.0f} tokens/s a worker; pool {_pool_share(found):.0%} reserved",
        "workers": f"{prefill.workers} prefill, {decode.workers} decode: {found.gpus} GPUs",
    }
    lines = [f"{title:<10}{text}" for title, text in rows.items()]
    if prefill.unmet:
        lines.append(f"not met: ttft, since a prompt alone takes {_ms(prefill.prompt_s)}")
    if decode.unmet:
        lines.append("not met: itl, since a step of one sequence takes longer")
    return lines + [f"note: {note}" for note in found.notes]


def _pool_share(found: Sizing) -> float:
    return (found.decode.sequences + found.decode.reserved) / found.sequences


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.4g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _to_json(name: str, request: SizingRequest, found: Sizing) -> dict[str, Any]:
    load = {key: value for key, value in asdict(request.load).items() if value != float("inf")}
    report: dict[str, Any] = {
        "model": name,
        "gpu": asdict(request.gpu),
        "load": load,
        **asdict(found),
    }
    report["memory"] |= {"pool_bytes": found.memory.pool_bytes, "tokens": found.memory.tokens}
    report |= {"gpus": found.gpus, "unmet": found.unmet}
    return report
