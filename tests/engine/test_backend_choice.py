"""One module chooses a model's matrices and kernels; others neither make them nor ask for numba."""

import ast
from collections.abc import Iterator

import pytest
import torch

from baton.engine.cpu.linear import CpuMatrix
from baton.engine.deterministic.linear_invariant import replaced
from baton.engine.execution import backend_choice
from baton.engine.execution.backend_choice import CpuBackend
from baton.engine.execution.engine_options import EngineOptions
from baton.engine.execution.loading import build_runner
from tests.support.decoder_probe import parts_of
from tests.support.small_models import Reference
from tests.test_architecture import ROOT, all_sources

CHOICE = "engine/execution/backend_choice.py"
# What makes a backend's matrices or kernels, by full name.
MAKERS = {
    "baton.engine.cpu.linear.CpuMatrices",
    "baton.engine.triton.matrices.TritonMatrices",
    "baton.engine.execution.invariant_kernels.invariant_kernels",
    "baton.engine.execution.device_kernels.device_kernels",
    "baton.engine.cpu_draws.sampling_numba.compiled_sampler",
}
# Where a compiler of kernels is imported: draws stand apart from the kernels of layers (decision
# 0080), checksums below the engine (0004).
ROOMS_OF = {
    "triton": ("engine/triton/",),
    "numba": ("engine/cpu/", "engine/cpu_draws/", "kv_transfer/checksum_numba.py"),
    "llvmlite": ("engine/cpu/", "engine/cpu_draws/"),
}


def product_files() -> Iterator[tuple[str, ast.Module]]:
    for path in all_sources():
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_one_module_makes_matrices_and_kernels():
    found: dict[str, set[str]] = {}
    for path, tree in product_files():
        for name in imported(tree) & MAKERS:
            found.setdefault(name, set()).add(path)
    extra = {"baton.engine.cpu_draws.sampling_numba.compiled_sampler"}
    own = {"engine/execution/invariant_kernels.py"}  # its set has the compiled sampler
    assert found == {name: {CHOICE} | (own if name in extra else set()) for name in MAKERS}


def test_one_module_of_the_engine_asks_for_packages():
    asking = {
        path
        for path, tree in product_files()
        if path.startswith("engine/")
        and any(isinstance(n, ast.Name) and n.id == "find_spec" for n in ast.walk(tree))
    }
    assert asking == {CHOICE}


@pytest.mark.parametrize("compiler", ROOMS_OF)
def test_kernel_compilers_are_imported_in_their_rooms(compiler: str) -> None:
    users = {
        path
        for path, tree in product_files()
        if any(name.split(".")[0] == compiler for name in imported(tree))
    }
    assert users
    assert {path for path in users if not path.startswith(ROOMS_OF[compiler])} == set()


def test_without_numba_no_product_is_compiled(
    qwen3: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product of a bfloat16 model, whose matrices numba's kernel packs where it can."""
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    monkeypatch.setattr("baton.engine.cpu.linear.compiled_linear", None)
    runner = build_runner(qwen3.folder, EngineOptions(blocks=4, dtype="bfloat16"))
    seen = []

    def watched(part):
        if isinstance(part, CpuMatrix):
            seen.append(part)
        return part

    replaced(parts_of(runner.decoder).weights, watched)
    assert seen


def test_matrices_follow_the_mode_and_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    strict = CpuBackend(deterministic=True).matrices(torch.bfloat16)
    assert (strict.batch_invariant, strict.compiled) == (True, True)
    assert not CpuBackend().matrices(torch.float32).compiled  # of bfloat16 alone
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    plain = CpuBackend().matrices(torch.bfloat16)
    assert (plain.batch_invariant, plain.compiled) == (False, False)
    assert CpuBackend().row_kernels(None, torch.bfloat16) == (None, None)
