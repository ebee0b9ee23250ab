"""Kernels compiled ahead of time, for a GPU that need not be here.

A `Variant` is a kernel with the types and constants of one use. What a compilation tells
(registers, spills, shared memory, PTX) is what can be known without the device. Needs triton
without its interpreter; owns nothing.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from baton.runtime.errors import EngineError

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+)\b.*?LOCAL:(\d+)")
_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True, slots=True)
class Variant:
    """`types` name those arguments that `constants` leave: "*bf16" a pointer, "i32", "fp32";
    ":16" after it promises a multiple of 16, as a launch finds out by looking at the value."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    capability: int  # 80, 90
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True, slots=True)
class Compiled:
    ptx: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread: spilled registers, or arrays that found no registers
    shared_bytes: int  # of a program


def pointer(dtype: torch.dtype) -> str:
    """The type of an aligned pointer to elements of `dtype`."""
    return f"*{_NAMES[dtype]}:16"


def compile_ahead(variant: Variant) -> Compiled:
    """Machine code for the variant's capability. Raises EngineError if an argument of the kernel
    has neither type nor constant, and what triton raises if the kernel does not compile."""
    names: list[str] = variant.kernel.arg_names
    lacking = set(names) - set(variant.types) - set(variant.constants)
    if lacking:
        raise EngineError(f"variant {variant.name}: no type for {', '.join(sorted(lacking))}")
    signature = {
        name: "constexpr" if name in variant.constants else variant.types[name].split(":")[0]
        for name in names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name not in variant.constants and variant.types[name].endswith(":16")
    }
    source = ASTSource(variant.kernel, signature, dict(variant.constants), aligned)
    made = triton.compile(
        source,
        target=GPUTarget("cuda", variant.capability, 32),
        options={"num_warps": variant.warps, "num_stages": variant.stages},
    )
    registers, stack = _usage(made.asm["cubin"])
    return Compiled(made.asm["ptx"], registers, stack, made.metadata.shared)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, by the tool that triton brings along."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    found = _USAGE.search(said.stdout)
    if found is None:
        raise EngineError(f"cuobjdump told no resource usage: {said.stdout!r}")
    registers, stack, local = (int(x) for x in found.groups())
    return registers, stack + local
