"""Triton's interpreter, nearly twice as fast: it puts its own functions in the place of Triton's
once for each launch, not again at every call of a function inside a kernel. And a proof of
determinism that it can bear."""

from __future__ import annotations

import os
from functools import cache
from types import FunctionType
from typing import Any

from baton.engine.execution import determinism_proof


def patch_once_a_launch() -> None:
    """Nothing without TRITON_INTERPRET=1, or with a Triton whose interpreter has other names."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    # Triton has no public way to replace these three; `hasattr` allows for other versions.
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor")
    if not all(hasattr(interpreter, name) for name in names):
        return
    patch, scope = interpreter._patch_lang, interpreter._LangPatchScope
    launch, languages = interpreter.GridExecutor.__call__, (interpreter.tl, interpreter.tl.core)
    done: set[tuple[bool, ...]] = set()

    @cache
    def seen(function: FunctionType) -> tuple[bool, ...]:
        """Which of Triton's modules the function names: those are what is patched."""
        named = function.__globals__.values()
        return tuple(any(value is language for value in named) for language in languages)

    def patched(function: FunctionType) -> object:
        if seen(function) in done:
            return scope()
        done.add(seen(function))
        return patch(function)

    def launched(self: object, *given: Any, **named: Any) -> None:
        done.clear()  # a launch takes back what was done for it
        launch(self, *given, **named)

    interpreter._patch_lang = patched
    interpreter.GridExecutor.__call__ = launched


def shorten_proof(block_size: int) -> None:
    """Prove on few tokens: a program takes the interpreter milliseconds."""
    determinism_proof.PROOF_TOKENS = determinism_proof.SIZES_TOKENS = 9
    determinism_proof.GRAPH_TOKENS = block_size
    determinism_proof.CHUNK_SIZES = ((3,),)
