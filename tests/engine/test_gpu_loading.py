"""The arithmetic of a GPU's memory: what is measured, in which order, and what is left for KV."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from baton.engine.execution import gpu_loading, loading
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.gpu_loading import memory_beside_pool, sized_runner
from baton.engine.memory.kv_pool import KvPool, block_bytes
from baton.engine.memory.kv_quant import FP8_E4M3, INT8, KvQuant
from baton.engine.memory.memory_plan import PoolForm
from baton.engine.scheduling.batch import StepResult
from baton.engine.spec.model_spec import ModelSpec, read_spec
from baton.runtime.errors import ConfigError, OutOfMemory
from tests.support.small_models import Reference

MIB = 1 << 20
KIND = torch.float32


class Device:
    """A device whose memory is counted: living pools, runners, and what a step once took."""

    def __init__(self, spec, total, beside, kernels=0, codes=None):
        self.codes = codes
        self.spec, self.total, self.beside, self.kernels = spec, total, beside, kernels
        self.pools, self.runners = weakref.WeakSet(), weakref.WeakSet()
        self.cached = 0  # of a step, until released
        self.others = 0  # another process's
        self.comes = 0  # to the others, while the runner is built first
        self.loaded = 0  # kernels: they stay
        self.log = []
        self.fails = None

    def free(self):
        return self.total - self.held() - self.loaded - self.others

    def held(self):
        pools = sum(pool.memory.nbytes for pool in self.pools)
        return pools + self.beside * len(self.runners) + self.cached

    def release(self):
        gc.collect()
        self.cached = 0

    def make_pool(self, blocks):
        self.log.append(f"pool {blocks}")
        pool = KvPool(self.spec, blocks, 16, KIND, torch.device("cpu"), self.codes)
        self.pools.add(pool)
        return pool

    def build(self, pool):
        self.log.append("build")
        if self.fails is not None and len(self.log) > self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.loaded = self.kernels
        self.others, self.comes = self.others + self.comes, 0
        runner = Runner(self, pool)
        self.runners.add(runner)
        return runner


class Runner:
    def __init__(self, device, pool):
        self.device, self.pool, self.max_context, self.memory = device, pool, 512, None
        self.eager = SimpleNamespace(numerics=None)

    def run(self, batch):
        (item,) = batch.slices
        self.device.log.append(f"step {len(item.tokens)} in {len(item.blocks)}")
        self.device.cached = 5 * MIB
        return StepResult(((),))


def options(**changes):
    usual = {"blocks": 0, "block_size": 16, "max_context": 0, "memory_fraction": 0.5}
    return EngineOptions(**usual | {"max_rows": 64, "step_tokens": 100} | changes)


@pytest.fixture
def spec(qwen3: Reference) -> ModelSpec:
    return read_spec(qwen3.folder)


def sized(spec, device, **changes):
    asked = options(**changes)
    form = PoolForm(spec, asked.block_size, KIND, asked.kv_quant)
    return sized_runner(form, asked, device.make_pool, device.build, device, 7 * MIB)


def test_the_pool_is_sized_after_all_else_was_measured(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    runner = sized(spec, device)
    each = block_bytes(spec, 16, KIND)
    left = 100 * MIB - 20 * MIB - 5 * MIB  # buffers and graphs, and a step's numbers
    assert runner.pool.blocks == left // 2 // each
    assert device.log == ["pool 7", "build", "step 100 in 7", f"pool {runner.pool.blocks}", "build"]
    plan = runner.memory
    assert (plan.weights_bytes, plan.free_bytes, plan.fraction) == (7 * MIB, 100 * MIB, 0.5)
    assert (plan.beside_bytes, plan.blocks) == (25 * MIB, runner.pool.blocks)


@pytest.mark.parametrize("codes", [INT8, FP8_E4M3])
def test_a_pool_in_eight_bits_is_sized_by_its_codes_and_scales(
    spec: ModelSpec, codes: KvQuant
) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB, codes=codes)
    runner = sized(spec, device, kv_dtype=codes.name)
    each = block_bytes(spec, 16, KIND, codes)
    assert each < block_bytes(spec, 16, KIND) / 3
    assert runner.pool.blocks == (100 - 25) * MIB // 2 // each
    plan = runner.memory
    assert (plan.block_bytes, plan.beside_bytes) == (each, 25 * MIB)
    assert plan.kv == f"{codes.name} of float32"


def test_nothing_of_the_measurement_is_left(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    runner = sized(spec, device)
    assert set(device.runners) == {runner} and set(device.pools) == {runner.pool}
    assert device.cached == 0


def test_with_all_of_the_memory_everything_still_fits(spec: ModelSpec) -> None:
    device = Device(spec, total=64 * MIB, beside=20 * MIB)
    runner = sized(spec, device, memory_fraction=0.98)
    device.cached = 5 * MIB  # of the largest step, once more
    assert device.free() >= 0
    assert runner.pool.blocks > 1000


def test_kernels_that_stay_loaded_are_not_given_to_the_pool(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB, kernels=8 * MIB)
    runner = sized(spec, device, memory_fraction=0.98)
    device.cached = 5 * MIB
    assert device.free() >= 0
    assert runner.memory.free_bytes == 92 * MIB


@pytest.mark.parametrize("most", [0, 10 * MIB])
def test_memory_taken_by_another_is_not_counted_as_this_runners(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """It is missing from what is free; of that too each takes its share."""
    monkeypatch.setattr(gpu_loading, "MAX_UNTRACKED_BYTES", most)
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    device.comes = 40 * MIB
    runner = sized(spec, device, memory_fraction=0.25)
    plan = runner.memory
    assert (plan.beside_bytes, plan.free_bytes) == (25 * MIB + most, 60 * MIB)
    assert plan.blocks == (60 * MIB - 25 * MIB - most) // 4 // block_bytes(spec, 16, KIND)


def test_memory_freed_by_another_adds_no_room_beside_the_pool(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    device.others, device.comes = 40 * MIB, -40 * MIB
    runner = sized(spec, device, memory_fraction=0.98)
    device.cached = 5 * MIB
    assert runner.memory.beside_bytes == 25 * MIB and device.free() >= 0


def test_two_that_share_a_gpu_both_find_room(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one sizes its pool while the first one captures, and keeps all that it took."""
    monkeypatch.setattr(gpu_loading, "MAX_UNTRACKED_BYTES", 0)
    first = Device(spec, total=100 * MIB, beside=20 * MIB)
    second = Device(spec, total=100 * MIB, beside=20 * MIB)
    kept = sized(spec, second, memory_fraction=0.49)
    first.comes = second.held()
    runner = sized(spec, first, memory_fraction=0.49)
    assert runner.pool.blocks > 0 and kept.pool.blocks > 0
    first.cached = 5 * MIB
    assert first.free() >= 0


@pytest.mark.parametrize(("blocks", "step"), [(40, "step 100 in 7"), (3, "step 48 in 3")])
def test_blocks_that_are_given_are_taken_without_measuring(
    spec: ModelSpec, blocks: int, step: str
) -> None:
    """The largest step runs all the same: no client is to wait for what it compiles."""
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    runner = sized(spec, device, blocks=blocks)
    assert device.log == [f"pool {blocks}", "build", step]
    assert (runner.memory.fraction, runner.memory.beside_bytes) == (0.0, 0)
    assert runner.memory.free_bytes == 100 * MIB


def test_a_step_is_no_longer_than_the_context(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=0)
    given = options(step_tokens=4096, max_context=40)
    memory_beside_pool(spec, given, device.make_pool, device.build, device)
    assert device.log[-1] == "step 40 in 3"


@pytest.mark.parametrize("fails", [1, 3])
def test_memory_that_runs_out_names_the_settings(spec: ModelSpec, fails: int) -> None:
    """While it is measured, and with the pool in place."""
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    device.fails = fails
    with pytest.raises(ConfigError, match=r"the GPU has \d+ bytes free.*pool.memory_fraction"):
        sized(spec, device)


@pytest.mark.parametrize("blocks", [0, 40])
def test_a_step_that_does_not_fit_is_refused_at_the_start(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    lack = OutOfMemory("a slice of 100 tokens does not fit into memory")
    short = StepResult(((),), failed={0: lack}, shortages=1)
    monkeypatch.setattr(Runner, "run", lambda runner, batch: short)
    with pytest.raises(ConfigError, match=r"and a step; lower pool\.blocks.*step\.prefill_tokens"):
        sized(spec, Device(spec, total=100 * MIB, beside=20 * MIB), blocks=blocks)


def test_other_errors_stay_what_they_are(spec: ModelSpec) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    device.build = lambda pool: 1 // 0
    with pytest.raises(ZeroDivisionError):
        sized(spec, device)


def test_a_full_device_is_reported_with_the_arithmetic(spec: ModelSpec) -> None:
    device = Device(spec, total=22 * MIB, beside=20 * MIB)
    with pytest.raises(ConfigError, match=r"the KV pool has 0 bytes.*pool\.memory_fraction"):
        sized(spec, device)


GPU = torch.device("cuda", 1)


def loaded(folder):
    return gpu_loading.gpu_runner(folder, GPU, KIND, options(), None)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nand more"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
@pytest.mark.parametrize("fails", ["load_weights", "CudaMemory"])
def test_weights_that_do_not_fit_name_the_remedies(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch, error: Exception, fails: str
) -> None:
    """While they are loaded, and where the GPU is too full for a context."""
    pytest.importorskip("triton")

    def fail(*_):
        raise error

    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_loading, "CudaMemory", lambda device: Device(None, 100, 0))
    monkeypatch.setattr(gpu_loading, fails, fail)
    with pytest.raises(ConfigError, match="into the memory of cuda:1.*out of memory") as reported:
        loaded(qwen3.folder)
    for remedy in ("worker.device", "worker.quantization", "smaller model"):
        assert remedy in str(reported.value)
    assert "and more" not in str(reported.value)


def test_other_errors_of_loading_stay_what_they_are(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_loading, "CudaMemory", lambda device: Device(None, 100, 0))
    monkeypatch.setattr(gpu_loading, "load_weights", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loaded(qwen3.folder)


def test_heads_unfit_for_kv_quant_are_refused_before_loading(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    odd = replace(read_spec(qwen3.folder), head_dim=30)
    monkeypatch.setattr(gpu_loading, "read_spec", lambda *_: odd)
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is int8.*heads have 30 .*give auto"):
        gpu_loading.gpu_runner(qwen3.folder, GPU, KIND, options(kv_dtype="int8"), None)


@pytest.mark.parametrize("wanted", [False, True])
def test_a_deterministic_runner_verifies_itself_over_its_pool(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    device = Device(spec, total=100 * MIB, beside=20 * MIB)
    proved = []
    monkeypatch.setattr(gpu_loading, "prove_graphs", lambda runner: proved.append(runner) or "bits")
    runner = sized(spec, device, deterministic=wanted)
    assert proved == ([runner] if wanted else [])
    assert runner.eager.numerics == ("bits" if wanted else None)


def test_a_proof_without_room_says_what_to_lower(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(runner):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(gpu_loading, "prove_graphs", no_room)
    with pytest.raises(ConfigError, match=r"lower pool\.blocks, pool\.memory_fraction"):
        sized(spec, Device(spec, total=100 * MIB, beside=20 * MIB), deterministic=True)


@pytest.mark.parametrize(("name", "codes"), [("auto", None), ("fp8_e4m3", FP8_E4M3)])
def test_a_gpu_learns_what_its_pool_holds(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch, name: str, codes: KvQuant | None
) -> None:
    reported = []

    def remember(*given):
        reported.append(given[3])
        raise ZeroDivisionError

    monkeypatch.setattr(loading, "chosen_device", lambda name: GPU)
    monkeypatch.setattr(gpu_loading, "gpu_runner", remember)
    with pytest.raises(ZeroDivisionError):
        loading.build_engine(qwen3.folder, EngineOptions(blocks=7, device="cuda:1", kv_dtype=name))
    assert (reported[0].kv_quant, reported[0].blocks) == (codes, 7)
    with pytest.raises(ConfigError, match=r"pool\.kv_dtype is 'int2'"):
        loading.build_engine(qwen3.folder, EngineOptions(device="cuda:1", kv_dtype="int2"))


def test_a_worker_without_triton_is_reported(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "baton.engine.execution.device_runner", None)
    with pytest.raises(ConfigError, match="kernels of cuda:1.*install triton.*worker.device"):
        loaded(qwen3.folder)
