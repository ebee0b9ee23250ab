from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest
import torch

import baton.engine.cpu.compiled as module
from baton.engine.cpu.compiled import cache_folder, compiled, inner, keep, take_threads
from baton.engine.cpu.dot_bf16 import supported
from tests.support.machine_speed import slowness

# Every kernel that hands on the address of an array of its own, with arrays of many sizes.
KERNELS = """
import torch
from types import SimpleNamespace
from baton.engine.cpu.attention_bf16 import BfloatAttention
from baton.engine.cpu.row_kernels import silu_gate
from baton.engine.spec.model_spec import AttentionSpec
from baton.engine.model.step_layout import ChunkRows
tensor = torch.randn(40, 1, 1, 2, 16, 128).to(torch.bfloat16)
attention = BfloatAttention(SimpleNamespace(tensor=tensor), AttentionSpec(0.1, (0,)))
table, queries = torch.arange(40), torch.randn(640, 8, 128).to(torch.bfloat16)
whole = attention.chunk(0, queries, ChunkRows(0, 640, 0, table))
assert whole.isfinite().all()
last = attention.decode(0, queries[-1:], table[None].int(), torch.tensor([640]).int())
torch.testing.assert_close(last[0], whole[-1], rtol=0, atol=0.01)
assert silu_gate(torch.randn(100, 8192).to(torch.bfloat16)).isfinite().all()
"""


def _fill(out):
    for index in numba.prange(out.shape[0]):
        out[index] = index + 1


def test_a_parallel_function_does_all_of_its_loop() -> None:
    out = np.zeros(100)
    compiled(_fill, parallel=True)(out)
    assert out.tolist() == list(range(1, 101))


def test_without_a_safe_layer_it_is_serial(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAFE_LAYERS", ("numba.no_such_layer",))
    function = compiled(_fill, parallel=True)
    assert not function.targetoptions["parallel"]
    out = np.zeros(3)
    function(out)
    assert out.tolist() == [1, 2, 3]


def test_without_a_cache_folder_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(function):
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(module, "KernelCache", refuse)
    out = np.zeros(2)
    compiled(_fill)(out)
    assert out.tolist() == [1, 2]


def test_infinities_keep_their_meaning() -> None:
    def least(out):
        out[0] = min(out[0], -np.inf)

    out = np.zeros(1)
    compiled(least)(out)
    assert out[0] == -np.inf


def test_a_part_keeps_its_roundings_for_every_first_caller() -> None:
    @inner
    def rounded(x, large):
        return (x + large) - large  # fast math makes x of it

    def call(x, large, out):
        out[0] = rounded(x, large)

    x, large, out = np.float32(0.3), np.float32(2**23), np.empty(1, dtype=np.float32)
    for strict in (False, True):
        module.numba.njit(fastmath=set() if strict else module.FASTMATH)(call)(x, large, out)
        assert out[0] == 0, f"strict={strict}"


def test_every_function_of_the_engine_says_its_own_math() -> None:
    engine = Path(module.__file__).parents[1]
    own = {path.name for path in engine.rglob("*.py") if "njit" in path.read_text()}
    assert own == {"compiled.py"}


def test_threads_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    take_threads()
    assert numba.get_num_threads() == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    take_threads()
    assert numba.get_num_threads() == module.NUMBA_THREADS


@pytest.mark.nightly
def test_numbas_start_leaves_torch_its_threads() -> None:
    """Else matrices are measured, and oneDNN's kernels kept, for another number than steps have."""
    text = (
        "import torch; torch.set_num_threads(1); torch.get_num_threads(); "
        "import baton.engine.cpu.compiled as made; "
        "print(torch.get_num_threads(), made.NUMBA_THREADS)"
    )
    environment = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    done = subprocess.run(
        [sys.executable, "-P", "-c", text],
        env=environment | {"NUMBA_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=60 * slowness(),
    )
    assert done.stdout.split() == ["1", "2"], done.stderr


def test_an_array_lives_until_it_is_no_longer_kept() -> None:
    @numba.njit
    def addresses(size):
        one = np.empty(size)
        first = one.ctypes.data
        other = np.empty(size)
        second = other.ctypes.data
        keep(one)
        keep(other)
        return first, second

    for size in (10, 1000, 100_000):
        first, second = addresses(size)
        assert first != second


@pytest.mark.nightly
@pytest.mark.skipif(not supported(), reason="this processor has no AVX2")
def test_kernels_use_no_memory_that_they_freed() -> None:
    """With this setting memory that is freed is unmapped, and a use of it ends the process."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"}
    command = [sys.executable, "-P", "-c", KERNELS]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250 * slowness()
    )
    assert done.returncode == 0, done.stderr


def test_a_change_in_any_compiled_source_asks_for_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel.py").write_text("import numba")
    (tmp_path / "part.py").write_text("from llvmlite import ir")
    (tmp_path / "plain.py").write_text("import torch")
    before = cache_folder(tmp_path, tmp_path / "base")
    assert before.parent == tmp_path / "base"
    (tmp_path / "plain.py").write_text("import torch, math")
    assert cache_folder(tmp_path, tmp_path / "base") == before
    (tmp_path / "part.py").write_text("from llvmlite import ir, binding")
    after = cache_folder(tmp_path, tmp_path / "base")
    assert after != before
    monkeypatch.setattr(module, "_SAFE_LAYERS", ("numba.no_such_layer",))
    assert cache_folder(tmp_path, tmp_path / "base") != after


@pytest.mark.nightly
def test_code_is_kept_in_that_folder_unless_the_user_names_one(tmp_path: Path) -> None:
    say = "import numba; import baton.engine.cpu.compiled; print(numba.config.CACHE_DIR)"

    def reported(**changes):
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)} | changes
        command = [sys.executable, "-P", "-c", say]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert reported(NUMBA_CACHE_DIR="").startswith(f"{tmp_path}/baton/kernels-")
    own = tmp_path / "own"
    assert reported(NUMBA_CACHE_DIR=str(own)).startswith(f"{own}/kernels-")


def test_a_user_without_a_home_gets_kernels_without_a_cache() -> None:
    say = """if True:
        import pwd
        def unknown(user): raise KeyError(user)
        pwd.getpwuid = unknown
        import numba
        from baton.engine.cpu.compiled import compiled
        def fill(out): out[0] = 7
        made = compiled(fill)
        import numpy
        out = numpy.zeros(1)
        made(out)
        print(numba.config.CACHE_DIR, out[0])
        """
    left = {"HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR"}
    environment = {key: value for key, value in os.environ.items() if key not in left}
    command = [sys.executable, "-P", "-c", say]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "7.0", done.stderr
