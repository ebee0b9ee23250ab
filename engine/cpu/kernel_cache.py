"""The cache of one kernel's compiled code, for which one process compiles at a time.

Workers of a host that start together need the same kernels. Without a lock each would compile all
of them beside the others, on the same cores; with it one compiles and the others load its code.
Installations whose sources are the same share it, wherever they lie: its folder is named by what
the sources contain (`compiled.cache_folder`), and below that by a source's own folder alone.
The checksums of kv_transfer, which imports no engine, are not among them: numba keeps their code.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.engine.scheduling.compile_clock import clock

# Longer than any kernel takes to compile. Then the other process is stopped or has failed, and
# this one compiles as well.
LONGEST_WAIT_S = 120.0
POLL_S = 0.02

_caching: Any = import_module("numba.core.caching")
_threads: Any = import_module("numba.core.compiler_lock")


class _SharedFolder(_caching.UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Return a name without the path of the installation, which numba's own has."""
        return Path(py_file).parent.name


class _SharedCode(_caching.CompileResultCacheImpl):  # type: ignore[misc]  # numba has no types
    _locator_classes = (_SharedFolder,)


class KernelCache(_caching.FunctionCache):  # type: ignore[misc]  # numba has no types
    """Same as numba's `FunctionCache`, which finds compiled code by signature. A process that finds
    none holds the function's lock while it compiles: until `released_after` the compilation, which
    may fail. Where no lock can be had, as on file systems without any, it compiles without."""

    _impl_class = _SharedCode

    def __init__(self, function: Any) -> None:
        """Raise RuntimeError if no folder for the code can be written."""
        super().__init__(function)
        self._path = os.path.join(self._cache_path, f"{self._impl.filename_base}.lock")
        self._lock: int | None = None

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code for `sig`, or None if this process is to compile it."""
        found = super().load_overload(sig, target_context)
        if found is not None or self._lock is not None:
            return found
        self._take_lock()
        found = super().load_overload(sig, target_context)
        if found is not None:
            self._release()
        return found

    def released_after(self, compiles: Callable[..., Any]) -> Callable[..., Any]:
        """Return `compiles`, which compiles or loads the code of a signature, with the release of
        the lock after it. One thread does both at a time, as numba lets one compile: another's
        release would take its lock away."""

        def compile_and_release(*args: Any) -> Any:
            with _threads.global_compiler_lock:
                try:
                    return compiles(*args)
                finally:
                    self._release()

        return compile_and_release

    def _take_lock(self) -> None:
        clock.begin()  # a step that waits for a kernel is no slow step
        try:
            self._impl.locator.ensure_cache_path()
            self._lock = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            until = time.monotonic() + LONGEST_WAIT_S
            while not _locked(self._lock) and time.monotonic() < until:
                time.sleep(POLL_S)  # flock has no time limit
        except OSError:
            self._release()  # others may compile the same kernel beside this process
        finally:
            clock.end()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
