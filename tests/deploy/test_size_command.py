"""`baton size`: its memory is the engine's plan, its times are near public points, and each
wrong argument is named."""

from __future__ import annotations

import csv
import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.deploy.bench.traffic_options import UNMET_EXIT
from baton.deploy.cli import main
from baton.deploy.host.restarts import CONFIG_EXIT
from baton.deploy.serve import gpu_sizing
from baton.deploy.serve.device_defaults import on_gpu
from baton.deploy.serve.gpu_sizing import SizingRequest, rank_plan, roofline, size_fleet
from baton.engine.execution import loading
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.spec.model_spec import read_spec
from baton.engine.spec.weight_sizes import weight_sizes
from baton.models.embedded import embedded_model
from baton.planner.gpu_table import GIB, Gpu, find_gpu
from baton.planner.sizing import Load
from baton.planner.timing_model import StepWork
from baton.runtime.config import Config
from baton.runtime.worker.attention_pairs import causal_pairs
from tests.support.published_models import write_config
from tests.support.shared_traces import shared_trace

LLAMA, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"
LOAD = Load(20.0, 7680, 512)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the shapes of published models, which is the working directory."""
    for name in (LLAMA, LLAMA_70B, "deepseek-ai/DeepSeek-V3"):
        write_config(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(folder: Path, **changes: object) -> SizingRequest:
    plain = SizingRequest(folder, find_gpu("h200"), LOAD, on_gpu(Config(), []))
    return replace(plain, **changes)


def test_the_plan_is_what_an_engine_plans_with_that_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the embedded model, whose memory is that of the sized GPU."""
    folder, options = embedded_model(), EngineOptions(memory_fraction=0.9)
    spec = read_spec(folder)
    gpu = Gpu("small", 2.0, 1e12, 1e14)
    sized = rank_plan(request(folder, gpu=gpu), spec, torch.bfloat16, options, 1)
    free = sized.free_bytes - sized.beside_bytes  # the CPU's loader has no graphs
    monkeypatch.setattr(loading, "available_bytes", lambda: free)
    runner = loading.build_runner(folder, replace(options, dtype="bfloat16"))
    planned = runner.memory
    assert planned is not None and planned.blocks == sized.blocks > 100
    terms = ("block_bytes", "block_size", "fraction", "kv", "max_context", "sequences")
    assert [getattr(planned, name) for name in terms] == [getattr(sized, name) for name in terms]


def test_weights_free_memory_and_pool_add_up_to_the_gpu(models: Path) -> None:
    found = size_fleet(request(models / LLAMA))
    plan = found.memory
    assert plan.weights_bytes == found.weights.bytes == pytest.approx(8.03e9 * 2, rel=0.01)
    total = plan.weights_bytes + plan.free_bytes + gpu_sizing.CONTEXT_BYTES
    assert total == find_gpu("h200").memory_bytes
    assert plan.block_bytes == 128 * 1024 * 16 and found.tp == 1
    assert found.sequences == plan.blocks // 512
    assert plan.pool_bytes <= 0.9 * (plan.free_bytes - plan.beside_bytes) < plan.free_bytes


def test_ranks_hold_what_one_gpu_does_not(models: Path) -> None:
    found = size_fleet(request(models / LLAMA_70B))
    assert found.tp == 2 and found.gpus == 2 * (found.prefill.workers + found.decode.workers)
    assert found.memory.weights_bytes == pytest.approx(found.weights.bytes / 2, rel=0.01)
    assert found.memory.block_bytes == 80 * 4 * 128 * 2 * 2 * 16  # half of the 8 KV heads
    assert any("has never run on GPUs" in note for note in found.notes)
    latent = size_fleet(request(models / "deepseek-ai/DeepSeek-V3", gpu=find_gpu("b200")))
    assert latent.tp == 8 and latent.memory.block_bytes == 61 * 576 * 2 * 16  # alike on each rank


def test_quantisation_saves_ranks_and_memory(models: Path) -> None:
    worker, pool = replace(Config().worker, quantization="int4"), Config().pool
    config = on_gpu(Config(worker=worker, pool=replace(pool, kv_dtype="int8")), [])
    found = size_fleet(request(models / LLAMA_70B, config=config))
    assert found.tp == 1 and found.memory.weights_bytes < 45 * GIB
    assert found.memory.kv == "int8 of bfloat16"


def test_times_are_near_those_of_public_points(models: Path) -> None:
    """Llama 3.1 70B in FP8 under vLLM on one to eight H200, four requests at a time: prompts and
    steps as the estimate has them, within a third at the median and a factor of two at most."""
    spec = read_spec(models / LLAMA_70B)
    whole = weight_sizes(spec, 1)
    gpu = replace(find_gpu("h200"), flops_per_s=2 * 989e12)  # FP8
    ratios = []
    with shared_trace("aic-h200/silicon_sample.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            chosen = (row["model_path"], row["system"], row["backend"], row["batch_size"])
            if chosen != (LLAMA_70B, "h200_sxm", "vllm", "4") or row["isl"] != "8192":
                continue
            tp = int(row["tp_size"])
            plan = rank_plan(
                request(models / LLAMA_70B), spec, torch.bfloat16, EngineOptions(kv_dtype="int8"), 8
            )
            plan = replace(plan, block_bytes=plan.block_bytes * 8 // tp)
            timing = roofline(gpu, whole, tp, plan, 4)
            prompt = StepWork(prompt_tokens=8192, pairs=causal_pairs(0, 8192))
            step = StepWork(sequences=4, context_tokens=4 * (8192 + int(row["osl"]) / 2))
            ratios.append(timing.step_s(prompt) * 1000 / float(row["silicon_ttft_ms"]))
            ratios.append(timing.step_s(step) * 1000 / float(row["silicon_tpot_ms"]))
    assert len(ratios) >= 6
    assert 0.75 < statistics.median(ratios) < 1.33
    assert min(ratios) > 0.5 and max(ratios) < 2


def test_a_table_is_printed_and_json_written(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = models / "size.json"
    words = ["size", LLAMA, "--gpu", "h200", "--context", "8k", "--rps", "20"]
    assert main.main([*words, "--json", str(out)]) == 0
    shown = capsys.readouterr()
    titles = [line.split()[0] for line in shown.out.splitlines()]
    assert titles == [
        "model", "GPU", "memory", "KV", "load", "timing", "prefill", "decode", "workers", "note:",
    ]  # fmt: skip
    found = json.loads(out.read_text())
    assert found["load"] == {"requests_per_s": 20.0, "prompt_tokens": 7680, "output_tokens": 512}
    workers = found["prefill"]["workers"], found["decode"]["workers"]
    assert f"{workers[0]} prefill, {workers[1]} decode: {sum(workers)} GPUs" in shown.out
    assert found["gpus"] == sum(workers) and found["memory"]["blocks"] > 1000
    assert found["unmet"] is False


def test_an_unmet_objective_has_its_exit_code(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["size", LLAMA, "--gpu", "l4", "--context", "8k", "--rps", "1", "--tp", "1"]
    words += ["--quantization", "int4"]
    assert main.main([*words, "--slo", "ttft=100ms,itl=1ms"]) == UNMET_EXIT
    shown = capsys.readouterr().out
    assert "not met: ttft, since a prompt alone takes" in shown and "not met: itl" in shown


def test_a_measured_timing_model_replaces_the_estimate(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = {
        "name": "measured", "kv_bytes_per_token": 131072,
        "chunk": {"fixed_s": 0.0, "per_token_s": 1e-4},
        "step": {"fixed_s": 0.02, "per_sequence_s": 0.0},
    }  # fmt: skip
    (models / "timing.json").write_text(json.dumps(timing))
    words = ["size", LLAMA, "--gpu", "h200", "--context", "8k", "--rps", "1", "--tp", "1"]
    assert main.main([*words, "--timing", "timing.json"]) == 0
    shown = capsys.readouterr().out
    assert "timing    measured" in shown and "768 ms a prompt" in shown
    assert "20 ms a step" in shown and "note:" not in shown


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--gpu": "h300"}, "--gpu 'h300' is not known: did you mean h200"),
        ({"--context": "256k"}, "--context is 262144: the model serves 131072 tokens"),
        ({"--output": "8k"}, "--output is 8192 of --context 8192"),
        ({"--slo": "ttft=1"}, "--slo 'ttft=1'"),
        ({"--tp": "3"}, "worker.tp is 3, which does not divide the model's 32 attention heads"),
        ({"MODEL": LLAMA_70B, "--gpu": "h100", "--tp": "1"}, "the KV pool has 0 bytes"),
        (
            {"MODEL": LLAMA_70B, "--gpu": "l4", "--context": "32k"},
            "no number of ranks up to 8 of l4 holds 4 sequences of 32768 tokens",
        ),
        ({"--timing": "timing.json"}, "name it by --tp"),
        ({"--timing": "timing.json", "--tp": "1"}, "1000 bytes of KV a token, this model"),
        ({"--set": "pool.blocks=1000000"}, "pool.blocks is 1000000"),
        ({"--set": "pool.blocks=100", "--tp": "1"}, "no sequence of 8192 tokens fits"),
        ({"MODEL": "no/"}, "there is no folder no/"),
    ],
)
def test_wrong_arguments_are_named(
    models: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str
) -> None:
    timing = {"name": "other", "kv_bytes_per_token": 1000, "chunk": {"per_token_s": 1.0}}
    (models / "timing.json").write_text(json.dumps(timing | {"step": {"fixed_s": 1.0}}))
    flags = {"--gpu": "h200", "--context": "8k", "--rps": "20"} | change
    model = flags.pop("MODEL", LLAMA)
    words = [word for pair in flags.items() for word in pair]
    assert main.main(["size", model, *words]) == CONFIG_EXIT
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--context", "0"), ("--context", "8q"), ("--rps", "0"), ("--tp", "0")]
)
def test_wrong_numbers_are_refused_by_the_parser(
    models: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    flags = {"--gpu": "h200", "--context": "8k", "--rps": "20"} | {flag: value}
    words = [word for pair in flags.items() for word in pair]
    with pytest.raises(SystemExit) as ended:
        main.main(["size", LLAMA, *words])
    assert ended.value.code == 2 and flag in capsys.readouterr().err
