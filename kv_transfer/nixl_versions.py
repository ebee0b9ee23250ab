"""The versions of NIXL and of the UCX that it has loaded: both ends of a handoff share them.

UCX comes with NIXL's package or from the system, so the library that is in this process is asked.
"""

from __future__ import annotations

import ctypes
from importlib import metadata

_MAPS = "/proc/self/maps"
_UNKNOWN = "unknown"


def library_versions(bindings: str) -> dict[str, str]:
    """By library; `bindings` names NIXL's Python module. To be asked once a backend exists."""
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
        library = ctypes.CDLL(path)  # which is loaded: the same one
        library.ucp_get_version_string.restype = ctypes.c_char_p
        version: bytes = library.ucp_get_version_string()
        return version.decode()
    return _UNKNOWN
