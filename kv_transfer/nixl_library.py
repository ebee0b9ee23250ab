"""NIXL's Python bindings, the versions of its libraries, and what describes a pool to it.

Versions of NIXL and of its UCX must be equal at both ends of a handoff. UCX comes with NIXL's
package or from the system, so the module reads the version of the library that this process has
loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.local_pool import DRAM, LocalPool, RankPool, memory_name
from baton.kv_transfer.mover import PeerPool
from baton.runtime.errors import ConfigError

_BINDINGS = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_MAPS = "/proc/self/maps"
_UNKNOWN = "unknown"


def load_bindings() -> Any:
    """Import NIXL's Python module, if possible without torch. Raises ConfigError without NIXL."""
    for name in _BINDINGS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for known in [n for n in logging.root.manager.loggerDict if n.startswith("nixl")]:
            logging.getLogger(known).setLevel(logging.WARNING)  # it prints on stdout
        return module
    raise ConfigError("NIXL is not installed: pip install 'baton-serve[worker]'")


def every_block(pool: PeerPool, rows: Sequence[tuple[int, int, int]]) -> NDArray[np.uint64]:
    """Return NIXL's compressed list (address, length, device, stride, count): for each of `rows`,
    a rank (0 where ranks have no pools), an offset and a length, these bytes of all blocks."""
    pools, count = memories(pool), pool.num_blocks
    listed = [
        [each.address + offset, length, each.device_id, each.block_bytes, count]
        for rank, offset, length in rows
        for each in (pools[rank],)
    ]
    return np.array(listed, dtype=np.uint64)


def memories(pool: PeerPool) -> tuple[RankPool, ...]:
    """Return the pools of the ranks, or the one pool."""
    one = RankPool(pool.base_address, pool.block_bytes, pool.device_id)
    return pool.rank_pools or (one,)


def described(pool: LocalPool, joined: int = 1) -> PeerPool:
    """Return the own pool as one of cells, of which a block has `joined`."""
    cell_bytes, cells = pool.block_bytes // joined, pool.blocks * joined
    return PeerPool(
        b"", "", b"", pool.address, cell_bytes, cells, pool.device_id, rank_pools=pool.rank_pools
    )


def register_pool(agent: Any, pool: LocalPool) -> Any:
    """Register the own pool's memory with a NIXL agent. Raises ConfigError if it is a device's and
    NIXL cannot, and what NIXL raises for a host's."""
    regions = [
        (each.address, pool.blocks * each.block_bytes, each.device_id, "")
        for each in memories(described(pool))
    ]
    try:
        return agent.register_memory(regions, pool.memory)
    except Exception as error:  # NIXL's classes have no common base; all are raised again
        if pool.memory == DRAM:
            raise
        raise ConfigError(
            f"NIXL cannot register the KV pool in {memory_name(pool.memory, pool.device_id)} "
            f"({type(error).__name__}): use a UCX that was built with CUDA, and a UCX_TLS, if "
            "set, with cuda_copy and cuda_ipc; or set worker.device to cpu"
        ) from error


def library_versions(bindings: str) -> dict[str, str]:
    """Return the versions by library, after a backend exists; `bindings`: NIXL's Python module."""
    return {"nixl": _nixl(bindings.partition(".")[0]), "ucx": _ucx()}


def _nixl(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # built from source, without metadata
        return _UNKNOWN


def _ucx() -> str:
    with open(_MAPS, encoding="utf-8", errors="replace") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libucp" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)  # the loaded one
        library.ucp_get_version_string.restype = ctypes.c_char_p
        version: bytes = library.ucp_get_version_string()
        return version.decode()
    return _UNKNOWN
