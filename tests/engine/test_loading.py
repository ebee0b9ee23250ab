from __future__ import annotations

import sys
from pathlib import Path

import pytest

from baton.engine.checkpoint.weights import load_weights
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_engine, build_runner
from baton.engine.memory.host_memory import release_freed_memory
from baton.engine.model.attention import TorchAttention
from baton.runtime.errors import ConfigError
from tests.support.small_models import Reference


def test_pool_is_sized_from_what_is_free(qwen3: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.execution.loading.available_bytes", lambda: 100 * 24576)
    runner = build_runner(qwen3.folder, EngineOptions(memory_fraction=0.5))
    assert runner.pool.blocks == 50
    with pytest.raises(ConfigError, match=r"pool\.memory_fraction"):
        build_runner(qwen3.folder, EngineOptions(memory_fraction=0.1))


def test_the_arithmetic_of_the_pool_is_kept(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.execution.loading.available_bytes", lambda: 100 * 24576)
    plan = build_runner(qwen3.folder, EngineOptions(memory_fraction=0.5)).memory
    assert (plan.free_bytes, plan.fraction, plan.blocks) == (100 * 24576, 0.5, 50)
    assert (plan.block_bytes, plan.block_size, plan.max_context) == (24576, 16, 512)
    given = build_runner(qwen3.folder, EngineOptions(blocks=3)).memory
    assert (given.fraction, given.blocks) == (0.0, 3)


@pytest.mark.parametrize(
    ("available", "loads", "when"),
    [
        ([9], 0, "before the weights are read"),
        ([10, 9], 1, "beside the weights"),
        ([10, 10], 1, ""),
    ],
)
def test_a_pool_that_memory_is_too_little_for_is_refused(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch, available: list[int], loads: int, when: str
) -> None:
    """Before the weights are read if that is known by then, and again beside them."""
    loaded = []

    def load(*given, **named):
        loaded.append(given)
        return load_weights(*given, **named)

    left = iter([blocks * 24576 + 24575 for blocks in available])
    monkeypatch.setattr("baton.engine.execution.loading.available_bytes", lambda: next(left))
    monkeypatch.setattr("baton.engine.execution.loading.load_weights", load)
    if when:
        with pytest.raises(ConfigError, match=rf"pool\.blocks is 10, .*{when}.*give at most 9,"):
            build_runner(qwen3.folder, EngineOptions(blocks=10))
    else:
        assert build_runner(qwen3.folder, EngineOptions(blocks=10)).pool.blocks == 10
    assert len(loaded) == loads


def test_the_refusal_names_both_sizes(qwen3: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.execution.loading.available_bytes", lambda: 3 << 29)
    with pytest.raises(ConfigError, match=r"2\.29 GiB, and 1\.50 GiB are available"):
        build_runner(qwen3.folder, EngineOptions(blocks=100_000))


@pytest.mark.parametrize("made", ["int8", "int4"])
def test_quantization_is_made_of_plain_weights(
    qwen3: Reference, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        "baton.engine.execution.loading.load_weights",
        lambda *given, **_: seen.append(given[-1]) or stop(),
    )
    with pytest.raises(StopAsyncIteration):
        build_runner(qwen3.folder, EngineOptions(blocks=2, quantization=made))
    assert seen == [made]


def stop():
    raise StopAsyncIteration


@pytest.mark.parametrize("how", [{"dtype": "int4"}, {"backend": "cuda"}, {"quantization": "int3"}])
def test_unknown_choices_are_refused(qwen3: Reference, how: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(how.values()))):
        build_runner(qwen3.folder, EngineOptions(blocks=2, **how))


def test_numba_is_optional(qwen3: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.execution.backend_choice.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "baton.engine.cpu.attention_numba", raising=False)
    seen = []
    monkeypatch.setattr(
        "baton.engine.execution.backend_choice.TorchAttention",
        lambda pool, spec: seen.append(pool) or TorchAttention(pool, spec),
    )
    runner = build_runner(qwen3.folder, EngineOptions(blocks=2))
    assert seen == [runner.pool]
    assert "baton.engine.cpu.attention_numba" not in sys.modules


def test_numba_asked_for_and_missing_is_said(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "baton.engine.cpu.attention_numba", None)
    with pytest.raises(ConfigError, match="needs numba"):
        build_runner(qwen3.folder, EngineOptions(blocks=2, backend="numba"))


def test_float16_goes_to_plain_torch(qwen3: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernel reads the two kinds that are float32 or the upper half of one."""
    seen = []
    monkeypatch.setattr(
        "baton.engine.execution.backend_choice.TorchAttention",
        lambda pool, spec: seen.append(pool) or TorchAttention(pool, spec),
    )
    assert build_runner(qwen3.folder, EngineOptions(blocks=2, dtype="float16")).pool in seen
    with pytest.raises(ConfigError, match="numba' has no float16: give auto or torch"):
        build_runner(qwen3.folder, EngineOptions(blocks=2, dtype="float16", backend="numba"))


def test_thresholds_of_the_c_library_are_set_while_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        def mallopt(self, which, value):
            asked.append((which, value))

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    with pytest.raises(KeyError), release_freed_memory():
        asked.append("loading")
        raise KeyError
    assert asked == [(-3, 128 << 10), "loading", (-3, 32 << 20), (-1, 64 << 20)]


def test_a_library_without_thresholds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    with release_freed_memory():
        pass


def test_what_is_for_a_cpu_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="for a CPU"):
        build_engine(tmp_path, EngineOptions(device="cuda", backend="torch"))
