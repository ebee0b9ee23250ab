"""On a GPU, what is not given has a GPU's default; what is given stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.deploy.cli import main
from baton.deploy.processes import worker_process
from baton.deploy.serve.device_defaults import on_gpu, worker_config
from baton.runtime.config import Config
from baton.runtime.errors import ConfigError
from baton.runtime.settings.loading import given_names, load

NAMES = {
    "pool.memory_fraction",
    "step.prefill_tokens",
    "step.chunk_tokens",
    "step.max_sequences",
    "handoff.read_bytes",
    "handoff.window_bytes",
}


def values(config: Config) -> tuple[float, int, int, int]:
    step = config.step
    return (
        config.pool.memory_fraction,
        step.prefill_tokens,
        step.chunk_tokens,
        step.max_sequences,
    )


def test_a_gpu_has_larger_steps_and_its_memory() -> None:
    assert values(on_gpu(Config(), set())) == (0.9, 8192, 8192, 256)
    assert on_gpu(Config(), NAMES) == Config()


def test_the_window_of_a_gpu_lands_in_time_from_a_slow_peer() -> None:
    on_host, on_device = Config().handoff, on_gpu(Config(), set()).handoff
    assert on_device.read_bytes > on_host.read_bytes
    assert on_device.window_bytes >= 2 * on_device.read_bytes
    for handoff in (on_host, on_device):
        slowest_gb_per_s = handoff.window_bytes / handoff.read_timeout_s / 1e9
        assert slowest_gb_per_s < handoff.preflight_floor_gb_per_s


@pytest.mark.parametrize("source", ["file", "environment", "flag"])
def test_what_is_given_stays_even_at_the_cpus_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    file, flags = tmp_path / "baton.toml", {}
    file.write_text("[step]\nmax_sequences = 64\n" if source == "file" else "")
    if source == "environment":
        monkeypatch.setenv("BATON_STEP__MAX_SEQUENCES", "64")
    if source == "flag":
        flags = {"step.max_sequences": "64"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    environ = {"BATON_STEP__MAX_SEQUENCES": "64"} if source == "environment" else {}
    config = load(file, environ, flags)
    assert given_names(file, environ, flags) == {"step.max_sequences"}
    assert values(worker_config(config, file, flags)) == (0.9, 8192, 8192, 64)


def test_a_cpu_keeps_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert worker_config(Config(), None, {}) == Config()
    with pytest.raises(ConfigError, match=r"worker\.device is cuda"):
        worker_config(load(None, {}, {"worker.device": "cuda"}), None, {})


def test_a_worker_starts_with_the_defaults_of_its_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`baton worker` on a host with a GPU."""
    started: list[Config] = []

    def run_worker(config: Config, **_: object) -> None:
        started.append(config)

    monkeypatch.setattr(worker_process, "run_worker", run_worker)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("BATON_TOKEN", "a token of sixteen or more characters")
    line = ["worker", "--role", "decode", "--worker-id", "d", "--model", str(tmp_path)]
    main.main([*line, "--registry", str(tmp_path), "--set", "step.max_sequences=64"])
    (config,) = started
    assert values(config) == (0.9, 8192, 8192, 64)


def test_chunks_are_whole_blocks() -> None:
    config = load(None, {}, {"pool.block_size": "48", "step.chunk_tokens": "96"})
    assert on_gpu(config, {"pool.block_size"}).step.chunk_tokens == 8160
    assert on_gpu(config, {"pool.block_size", "step.chunk_tokens"}).step.chunk_tokens == 96
