"""How this engine's Numba functions are compiled, and how many threads they take.

Needs numba, which is optional: only modules that need it themselves import this one. Keeps no
state beyond the count of threads that numba started with.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
import torch
from numba import types
from numba.extending import intrinsic

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # infinities and NaN keep their meaning
_SAFE_LAYERS = ("numba.np.ufunc.tbbpool", "numba.np.ufunc.omppool")
_THREADS = numba.get_num_threads()


def compiled(function: Callable[..., None], *, parallel: bool = False, strict: bool = False) -> Any:
    """`function` without the GIL. Its code is kept in a cache folder where there is one, else
    compiled at every start. `parallel`: its `prange` loops are shared among threads.
    `strict`: no operation is fused with another or put in another order."""

    fastmath = set() if strict else _FASTMATH

    def jit(cache: bool) -> Any:
        shared = parallel and _parallel_is_safe()
        return numba.njit(cache=cache, parallel=shared, nogil=True, fastmath=fastmath)(function)

    try:
        return jit(cache=True)
    except RuntimeError:
        return jit(cache=False)


def _keep(_typing: Any, array: Any) -> Any:
    """Inside compiled functions: `array` is not freed before. Numba frees an array after its
    last use, and does not count what is done with its address (`array.ctypes.data`)."""
    return types.void(array), lambda context, *_rest: context.get_dummy_value()


keep: Any = intrinsic(_keep)


def take_threads() -> None:
    """Let this thread's parallel calls use as many threads as torch does."""
    numba.set_num_threads(min(torch.get_num_threads(), _THREADS))


def _parallel_is_safe() -> bool:
    """Numba's last resort, "workqueue", ends the process when two threads launch at once."""
    return any(_importable(name) for name in _SAFE_LAYERS)


def _importable(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True
