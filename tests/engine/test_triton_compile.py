"""Compiling ahead of time: what is told of a kernel, and what is refused."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from baton.engine.triton_compile import Variant, compile_ahead, pointer
from baton.runtime.errors import EngineError


@triton.jit
def scaled(out, x, factor, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(out + places, tl.load(x + places) * factor)


@triton.jit
def product(out, a, b, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + places, tl.dot(tl.load(a + places), tl.load(b + places)))


TYPES = {"out": pointer(torch.float32), "x": pointer(torch.float32), "factor": "fp32"}
VARIANT = Variant("scaled", scaled, TYPES, {"COUNT": 1024}, capability=90)


def test_tells_what_was_made():
    made = compile_ahead(VARIANT)
    assert ".target sm_90" in made.ptx
    assert 8 <= made.registers <= 64
    assert made.stack_bytes == made.shared_bytes == 0


def test_compiles_for_the_capability_asked_for():
    assert ".target sm_80" in compile_ahead(replace(VARIANT, capability=80)).ptx


def test_alignment_makes_loads_wide():
    plain = replace(VARIANT, types={**TYPES, "x": "*fp32"})
    assert "ld.global.v4" in compile_ahead(VARIANT).ptx
    assert "ld.global.v4" not in compile_ahead(plain).ptx


def test_registers_that_do_not_suffice_are_told_as_stack():
    """A matrix product of one warp keeps its 128 x 128 sums in registers, of which it has 255
    a thread: 512 are too many."""
    dtype = pointer(torch.float16)
    types = {"out": pointer(torch.float32), "a": dtype, "b": dtype}
    assert compile_ahead(Variant("product", product, types, {"SIZE": 128}, 80, 1)).stack_bytes > 0
    assert compile_ahead(Variant("product", product, types, {"SIZE": 32}, 80, 1)).stack_bytes == 0


def test_an_argument_without_a_type_is_refused():
    lacking = replace(VARIANT, types={"out": TYPES["out"]})
    with pytest.raises(EngineError, match="scaled: no type for factor, x"):
        compile_ahead(lacking)


def test_pointers_are_aligned_and_typed():
    assert pointer(torch.bfloat16) == "*bf16:16"
    assert pointer(torch.int32) == "*i32:16"
