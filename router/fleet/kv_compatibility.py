"""Prefill workers whose KV no decode worker can take, and what differs.

Such a worker is linked, and no placement names it: without a report a whole pool would stand idle
while decode workers prefill by themselves. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.router.fleet.worker_view import Shape

_FIELDS = ("model fingerprint", "KV dtype", "block size")


def incompatible_prefill_workers(
    prefill: Mapping[str, Shape], decode: Mapping[str, Shape]
) -> dict[str, str]:
    """Return, for each prefill worker without a decode worker of its shape, what differs from the
    most similar one. Empty while there is no decode worker to compare with."""
    shapes = set(decode.values())
    found = {}
    for worker_id, shape in prefill.items():
        if shapes and shape not in shapes:
            nearest = min(sorted(shapes), key=lambda other: len(_differences(shape, other)))
            found[worker_id] = "; ".join(_differences(shape, nearest))
    return found


def _differences(shape: Shape, other: Shape) -> list[str]:
    pairs = zip(_FIELDS, shape, other, strict=True)
    return [
        f"{name} {own!r}, decode workers have {its!r}" for name, own, its in pairs if own != its
    ]
