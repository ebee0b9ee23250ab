"""The compilation of this engine's Numba functions, and the number of their threads.

It needs numba, which is optional: only modules that need numba import this one. Its only state is
the number of threads that numba started with and numba's cache folder.

Numba considers cached code current while the function's own file is unchanged, although the code
includes functions and constants of other modules. Each version of the engine's sources that are
compiled, or have constants for those, therefore has its own cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import torch
from numba import types
from numba.extending import intrinsic

from baton.engine.cpu.kernel_cache import KernelCache
from baton.engine.scheduling.compile_clock import watch_numba

FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # infinities and NaN stay valid
_CONSTANTS = {"kv_quant.py"}  # sources with constants that compiled code includes
_SAFE_LAYERS = ("numba.np.ufunc.tbbpool", "numba.np.ufunc.omppool")
_TORCH_THREADS = torch.get_num_threads()
NUMBA_THREADS = numba.get_num_threads()
# `get_num_threads` starts numba's threads, which changes OpenMP's, and so torch's, thread count.
torch.set_num_threads(_TORCH_THREADS)


def compiled(function: Callable[..., None], *, parallel: bool = False, strict: bool = False) -> Any:
    """Compile `function` to run without the GIL. The code is cached in a folder if there is one,
    else compiled at every start. `parallel`: threads share its `prange` loops. `strict`: operations
    are neither fused nor reordered."""

    fastmath = set() if strict else FASTMATH

    shared = parallel and _parallel_is_safe()
    made: Any = numba.njit(parallel=shared, nogil=True, fastmath=fastmath)(function)
    with suppress(RuntimeError):  # no folder can be written
        made._cache = KernelCache(function)  # as numba's `enable_caching` does
        made.compile = made._cache.released_after(made.compile)
    return made


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a `function` that only compiled functions call; its operations stay as written.
    Without this, numba compiles it with the fast math of its first caller."""
    made = numba.njit(error_model="numpy", fastmath=False, **options)
    return made if function is None else made(function)


def cache_folder(sources: Path, base: Path) -> Path:
    """Return the folder under `base` for the code that numba compiles from all of `sources`."""
    digest = blake2b(digest_size=8, person=b"baton-kernels")
    digest.update(f"{numba.__version__} {_parallel_is_safe()}".encode())
    for path in sorted(sources.rglob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"llvmlite" in text or path.name in _CONSTANTS:
            digest.update(text)
    return base / f"kernels-{digest.hexdigest()}"


def _keep(_typing: Any, array: Any) -> Any:
    """Keep `array` alive until here, in a compiled function. Numba frees an array after its last
    use, and does not track uses of its address (`array.ctypes.data`)."""
    return types.void(array), lambda context, *_rest: context.get_dummy_value()


keep: Any = intrinsic(_keep)


def take_threads() -> None:
    """Set the thread count of this thread's parallel calls to torch's."""
    numba.set_num_threads(min(torch.get_num_threads(), NUMBA_THREADS))


def _parallel_is_safe() -> bool:
    """Return whether two threads may launch parallel code at once. Numba's fallback layer
    "workqueue" ends the process in that case."""
    return any(_importable(name) for name in _SAFE_LAYERS)


def _importable(name: str) -> bool:
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def _user_cache() -> Path | None:
    """Return the user's folder for cached code, None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    except RuntimeError:
        return None


watch_numba()
_settings: Any = numba.config
_base = Path(_settings.CACHE_DIR) if _settings.CACHE_DIR else _user_cache()  # NUMBA_CACHE_DIR
if _base is not None:
    _settings.CACHE_DIR = str(cache_folder(Path(__file__).parents[1], _base))
