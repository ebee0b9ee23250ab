"""The kinds of x86 processors, by what decides which kernel multiplies a bfloat16 matrix."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from baton.engine.cpu import dot_bf16, linear_numba


@dataclass(frozen=True, slots=True)
class Processor:
    """The answers to the questions of `linear_numba` about a processor."""

    supported: bool = True  # AVX2, or more
    native: bool = False  # the AVX-512 BF16 instruction
    has_matrix_unit: bool = False  # AMX
    bfloat16_is_fast: bool = False  # oneDNN has kernels: from AVX-512 on


PROCESSORS = {
    "older than AVX2": Processor(supported=False),
    "AVX2": Processor(),
    "AVX-512": Processor(bfloat16_is_fast=True),  # Skylake, Cascade Lake
    "AVX-512 BF16": Processor(native=True, bfloat16_is_fast=True),
    "AMX": Processor(native=True, has_matrix_unit=True, bfloat16_is_fast=True),
}


def pretend_processor(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let matrices be packed as on that kind of processor. What computes with them stays as the
    present processor needs it."""
    for name, value in asdict(PROCESSORS[kind]).items():
        monkeypatch.setattr(linear_numba, name, lambda value=value: value)


def without_matrix_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all kernels see the present processor without AMX."""
    found = {**dot_bf16._features(), "amx-bf16": False}
    monkeypatch.setattr(dot_bf16, "_features", lambda: found)
