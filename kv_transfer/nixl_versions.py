"""The versions of NIXL and of its loaded UCX, which must be equal at both ends of a handoff.

UCX comes with NIXL's package or from the system, so the module reads the version of the library
that this process has loaded.
"""

from __future__ import annotations

import ctypes
from importlib import metadata

_MAPS = "/proc/self/maps"
_UNKNOWN = "unknown"


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
