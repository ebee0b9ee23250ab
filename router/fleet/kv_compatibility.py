"""Prefill workers whose KV no decode worker can take, and what differs.

Such a worker is linked, and no placement names it: without a report a whole pool would stand idle
while decode workers prefill by themselves. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.fleet.worker_view import KvFormat

_FIELDS = ("model fingerprint", "KV dtype", "block size")


def incompatible_prefill_workers(
    prefill: Mapping[str, KvFormat], decode: Mapping[str, KvFormat]
) -> dict[str, str]:
    """Return, for each prefill worker without a decode worker of its KV format, what differs from
    the most similar one. Empty while there is no decode worker to compare with."""
    formats = set(decode.values())
    found = {}
    for worker_id, kv_format in prefill.items():
        if formats and kv_format not in formats:
            nearest = min(sorted(formats), key=lambda other: len(_differences(kv_format, other)))
            found[worker_id] = "; ".join(_differences(kv_format, nearest))
    return found


def _differences(kv_format: KvFormat, other: KvFormat) -> list[str]:
    pairs = zip(_FIELDS, kv_format, other, strict=True)
    return [
        f"{name} {own!r}, decode workers have {its!r}" for name, own, its in pairs if own != its
    ]
