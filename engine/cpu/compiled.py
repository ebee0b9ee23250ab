"""How this engine's Numba functions are compiled, and how many threads they take.

Needs numba, which is optional: only modules that need it themselves import this one. Keeps no
state beyond the count of threads that numba started with and numba's own cache folder.

Numba takes cached code for current while the function's own file is unchanged, though it holds
code of other modules too. So every version of this engine's compiled sources has a folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import torch
from numba import types
from numba.extending import intrinsic

from baton.engine.scheduling.compile_clock import watch_numba

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # infinities and NaN keep their meaning
_SAFE_LAYERS = ("numba.np.ufunc.tbbpool", "numba.np.ufunc.omppool")
_TORCH_THREADS = torch.get_num_threads()
_THREADS = numba.get_num_threads()
# Asking starts numba's threads, and that sets OpenMP's number of them, torch's, in this thread.
torch.set_num_threads(_TORCH_THREADS)


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


def inner(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A decorator: `function` is called by compiled ones alone, and each of its operations stays
    as written. Unless it says so, numba gives it the fast math of whichever caller comes first."""
    made = numba.njit(error_model="numpy", fastmath=False, **options)
    return made if function is None else made(function)


def cache_folder(sources: Path, base: Path) -> Path:
    """Under `base`, the folder of the code that numba compiles from the modules in `sources`."""
    digest = blake2b(digest_size=8, person=b"baton-kernels")
    digest.update(f"{numba.__version__} {_parallel_is_safe()}".encode())
    for path in sorted(sources.glob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"llvmlite" in text:
            digest.update(text)
    return base / f"kernels-{digest.hexdigest()}"


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


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


watch_numba()
_settings: Any = numba.config
if not _settings.CACHE_DIR:  # the user's own choice, by NUMBA_CACHE_DIR, stands
    _settings.CACHE_DIR = str(cache_folder(Path(__file__).parent, _user_cache()))
