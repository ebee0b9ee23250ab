import sys

import pytest

from baton.engine.attention import TorchAttention
from baton.engine.host_memory import available_bytes, freed_at_once, resident_bytes
from baton.engine.loading import build_engine, build_runner
from baton.runtime.errors import ConfigError


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def meminfo(tmp_path):
    return write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:   5000 kB\nHuge: 1\n")


def test_available_is_what_the_kernel_says(meminfo, tmp_path):
    assert available_bytes(meminfo, tmp_path) == 5000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", "5", 5000 * 1024),
        ("3000000", "1000000", 2000000),
        ("100", "200", 0),
        ("999999999999", "0", 5000 * 1024),
    ],
)
def test_a_container_has_its_own_limit(meminfo, tmp_path, limit, used, expected):
    write(tmp_path / "memory.max", f"{limit}\n")
    write(tmp_path / "memory.current", f"{used}\n")
    assert available_bytes(meminfo, tmp_path) == expected


def test_without_the_kernels_figures_all_memory_counts(tmp_path):
    assert available_bytes(tmp_path / "none", tmp_path) > 1 << 20


def test_pool_is_sized_from_what_is_free(qwen3, monkeypatch):
    monkeypatch.setattr("baton.engine.loading.available_bytes", lambda: 100 * 24576)
    runner = build_runner(qwen3.folder, memory_fraction=0.5)
    assert runner.pool.blocks == 50
    with pytest.raises(ConfigError, match=r"pool\.memory_fraction"):
        build_runner(qwen3.folder, memory_fraction=0.1)


def test_a_process_knows_what_it_holds_without_mapped_files(tmp_path):
    status = write(
        tmp_path / "status", "VmHWM: 99 kB\nRssAnon:\t 7 kB\nRssFile: 50 kB\nRssShmem: 2 kB\n"
    )
    assert resident_bytes(status) == 9 * 1024
    assert resident_bytes(tmp_path / "none") == 0


def test_the_arithmetic_of_the_pool_is_kept(qwen3, monkeypatch):
    monkeypatch.setattr("baton.engine.loading.available_bytes", lambda: 100 * 24576)
    plan = build_runner(qwen3.folder, memory_fraction=0.5).memory
    assert (plan.free_bytes, plan.fraction, plan.blocks) == (100 * 24576, 0.5, 50)
    assert (plan.block_bytes, plan.block_size, plan.max_context) == (24576, 16, 512)
    given = build_runner(qwen3.folder, blocks=3).memory
    assert (given.fraction, given.blocks) == (0.0, 3)


@pytest.mark.parametrize("made", ["int8", "int4"])
def test_quantization_is_made_of_plain_weights(qwen3, made, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "baton.engine.loading.load_weights", lambda *given: seen.append(given[-1]) or stop()
    )
    with pytest.raises(StopAsyncIteration):
        build_runner(qwen3.folder, blocks=2, quantization=made)
    assert seen == [made]


def stop():
    raise StopAsyncIteration


@pytest.mark.parametrize("how", [{"dtype": "int4"}, {"backend": "cuda"}, {"quantization": "int3"}])
def test_unknown_choices_are_refused(qwen3, how):
    with pytest.raises(ConfigError, match=next(iter(how.values()))):
        build_runner(qwen3.folder, blocks=2, **how)


def test_numba_is_optional(qwen3, monkeypatch):
    monkeypatch.setattr("baton.engine.loading.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "baton.engine.attention_numba", raising=False)
    seen = []
    monkeypatch.setattr(
        "baton.engine.loading.TorchAttention",
        lambda pool, spec: seen.append(pool) or TorchAttention(pool, spec),
    )
    runner = build_runner(qwen3.folder, blocks=2)
    assert seen == [runner.pool]
    assert "baton.engine.attention_numba" not in sys.modules


def test_numba_asked_for_and_missing_is_said(qwen3, monkeypatch):
    monkeypatch.setitem(sys.modules, "baton.engine.attention_numba", None)
    with pytest.raises(ConfigError, match="needs numba"):
        build_runner(qwen3.folder, blocks=2, backend="numba")


def test_float16_goes_to_plain_torch(qwen3, monkeypatch):
    """The compiled kernel reads the two kinds that are float32 or the upper half of one."""
    seen = []
    monkeypatch.setattr(
        "baton.engine.loading.TorchAttention",
        lambda pool, spec: seen.append(pool) or TorchAttention(pool, spec),
    )
    assert build_runner(qwen3.folder, blocks=2, dtype="float16").pool in seen
    with pytest.raises(ConfigError, match="numba' has no float16: give auto or torch"):
        build_runner(qwen3.folder, blocks=2, dtype="float16", backend="numba")


def test_thresholds_of_the_c_library_are_set_while_loading_and_after(monkeypatch):
    asked = []

    class Library:
        def mallopt(self, which, value):
            asked.append((which, value))

    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    with pytest.raises(KeyError), freed_at_once():
        asked.append("loading")
        raise KeyError
    assert asked == [(-3, 128 << 10), "loading", (-3, 32 << 20), (-1, 64 << 20)]


def test_a_library_without_thresholds_is_left_alone(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    with freed_at_once():
        pass


@pytest.mark.parametrize("how", [{"deterministic": True}, {"backend": "torch"}])
def test_what_is_for_a_cpu_is_refused_on_a_gpu(monkeypatch, tmp_path, how):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ConfigError, match="for a CPU"):
        build_engine(tmp_path, device="cuda", **how)
