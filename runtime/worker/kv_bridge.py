"""The KV of workers that store it in different ways: which pairs can exchange it, and which not.

The granter converts to the reader's KV dtype, if one of the two is the other's in eight bits. The
handshake, both roles of worker and the router's placement ask here. Pure; knows no tensors.
"""

from __future__ import annotations

_EIGHT_BITS = ("int8", "fp8_e4m3")
_PLAIN_BYTES = {"float32": 4}  # of a number; of other dtypes 2
_OF = " of "  # "int8 of bfloat16": codes of a model that computes in bfloat16


def is_narrow(kv_dtype: str) -> bool:
    """Return whether this is KV in eight bits."""
    return _OF in kv_dtype


def loses(source: str, reader: str) -> bool:
    """Return whether KV of the source's dtype is less precise than what the reader stores: then
    neither it nor what follows from it serves others."""
    return is_narrow(source) and not is_narrow(reader)


def bridged_dtypes(kv_dtype: str) -> list[str]:
    """Return the other KV dtypes that KV of this one can be converted to and from."""
    plain = kv_dtype.partition(_OF)[2]
    return [plain] if plain else [f"{quant}{_OF}{kv_dtype}" for quant in _EIGHT_BITS]


def bridges(kv_dtype: str, other: str) -> bool:
    """Return whether workers of these KV dtypes can exchange KV."""
    both = other in bridged_dtypes(kv_dtype) and kv_dtype in bridged_dtypes(other)
    return kv_dtype == other or both


def most_targets(granter: str, reader: str) -> int:
    """Return how many of its own blocks a granter needs at most for one that it converts; 0: their
    KV dtypes are the same. A number in eight bits is a byte, and a share of a scale."""
    if granter == reader:
        return 0
    return 1 if is_narrow(reader) else _PLAIN_BYTES.get(reader, 2)
