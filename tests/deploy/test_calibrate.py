"""`baton calibrate` from tables of kernels, and from what a fleet has recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from baton.deploy.cli import main
from baton.deploy.host.restarts import CONFIG_EXIT
from baton.deploy.serve.kernel_tables import rank_form, read_tables
from baton.planner.measured_points import PointFilter, read_points
from baton.planner.timing_file import read_fit
from baton.planner.timing_model import StepWork
from baton.runtime.errors import ConfigError
from tests.support.shared_traces import shared_trace

ROOT = Path(__file__).resolve().parent.parent.parent
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
EXPERTS = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
WINDOW = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 4096,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


@pytest.fixture
def pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pyarrow importable: Baton has no use for it elsewhere, but clients have that
    `make nightly` installs."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    pattern = f"build/clients/*/lib/{version}/site-packages/pyarrow"
    for package in sorted(ROOT.glob(pattern)):
        monkeypatch.setattr(sys, "path", [*sys.path, str(package.parent)])
        break
    pytest.importorskip("pyarrow", reason="pyarrow is not installed, nor beside a client in build")


def test_tables_without_pyarrow_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.deploy.serve.kernel_tables.installed", lambda module: False)
    with pytest.raises(ConfigError, match="--tables needs pyarrow: pip install pyarrow"):
        read_tables(tmp_path, "vllm")


@pytest.mark.nightly
def test_a_folder_without_tables_is_refused(tmp_path: Path, pyarrow: None) -> None:
    with pytest.raises(ConfigError, match="has 0 files vllm-VERSION-gemm_perf.parquet"):
        read_tables(tmp_path, "vllm")
    (tmp_path / "vllm-1-gemm_perf.parquet").write_text("no table")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        read_tables(tmp_path, "vllm")


def test_a_rank_has_its_share_of_heads_and_columns(model: Path) -> None:
    form, kv_bytes = rank_form(model, 4, "fp8", "bfloat16")
    assert (form.heads, form.kv_heads, form.ffn_size) == (16, 2, 7168)
    assert list(form.matrices()) == [(2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)]
    assert kv_bytes == 327_680


@pytest.mark.parametrize("change", [EXPERTS, WINDOW])
def test_a_model_of_another_kind_is_refused(model: Path, change: dict[str, object]) -> None:
    (model / "config.json").write_text(json.dumps(LLAMA_70B | change))
    with pytest.raises(ConfigError, match="describes dense models with ordinary attention"):
        rank_form(model, 1, "bfloat16", "bfloat16")


@pytest.mark.nightly
def test_kernels_of_an_h200_take_less_than_a_server(
    model: Path, tmp_path: Path, pyarrow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    points = shared_trace("aic-h200/silicon_sample.csv")
    out = tmp_path / "timing.json"
    words = ["--tables", str(points.parent), "--model", str(model), "--tp", "4"]
    words += ["--gemm-dtype", "fp8", "--name", "Llama 3.1 70B, four H200", "--out", str(out)]
    assert main.main(["calibrate", *words]) == 0
    printed = capsys.readouterr().out
    assert "not measured, so it costs nothing: transfer, host" in printed
    assert "not covered: sums between ranks" in printed
    fit = read_fit(out)
    assert fit.errors["chunk"].median < 0.1 and fit.errors["step"].median < 0.1
    shares = []
    for each in read_points(points, PointFilter("meta-llama/Llama-3.1-70B", tensor_parallel=4)):
        first, second = each.amounts
        work = (
            StepWork(prompt_tokens=int(first), pairs=second)
            if each.kind == "chunk"
            else StepWork(sequences=int(first), context_tokens=second)
        )
        shares.append(fit.model.step_s(work) / each.seconds)
    assert min(shares) > 0.3 and max(shares) < 1


def test_tables_need_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tables", str(tmp_path), "--name", "x", "--out", str(tmp_path / "t")]
    assert main.main(["calibrate", *words]) == CONFIG_EXIT
    assert "give --model, from which the shape is read" in capsys.readouterr().err


def test_samples_need_the_bytes_of_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--samples", "s.jsonl", "--name", "x", "--out", str(tmp_path / "t")]
    assert main.main(["calibrate", *words]) == CONFIG_EXIT
    assert "--kv-bytes is missing" in capsys.readouterr().err


def test_one_source_has_to_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["calibrate", "--name", "x", "--out", str(tmp_path / "t")])
    assert ended.value.code == 2
    assert "one of the arguments --samples --points --tables --instance" in capsys.readouterr().err
