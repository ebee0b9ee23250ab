"""The entry of one worker in a shared registry: what it says, its age, and its signature.

Every process that can write to the registry's server can write an entry, so an entry counts only
if it carries the signature of one of the cluster's tokens. The counter rises with each
announcement of a boot: a copy of an old entry is recognised by it. Pure; holds no state.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import asdict, dataclass
from hashlib import blake2b

from baton.runtime.errors import ConfigError
from baton.runtime.registry import WorkerRecord, check_worker_id, record_fault

MAX_ENTRY_BYTES = 8192
MAX_FIELD_CHARACTERS = 1024
_COUNTER_LIMIT = 1 << 63
_SIGNATURE_BYTES = 16
_FIELDS = frozenset(("record", "started", "counter", "withdrawn", "signature"))


@dataclass(frozen=True, slots=True)
class SignedEntry:
    """`started` orders the boots of a worker, the newest last; `counter` the entries of one boot.
    Both are nanoseconds of the worker's wall clock. With `withdrawn` the boot has ended."""

    record: WorkerRecord
    started: int
    counter: int
    withdrawn: bool = False


class EntrySigner:
    """Signs with the first of `tokens`; accepts the signatures of all of them."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self._keys = [
            blake2b(token.encode(), digest_size=32, person=b"baton-members").digest()
            for token in tokens
        ]

    def write(self, entry: SignedEntry) -> bytes:
        """Return the entry as bytes with its signature. Raises ConfigError for a record that
        `read` would refuse."""
        content = asdict(entry)
        signature = _signature(self._keys[0], content)
        written = json.dumps(content | {"signature": signature}).encode()
        if (fault := _fault(entry, len(written))) is not None:
            raise ConfigError(
                f"worker {entry.record.worker_id[:100]} cannot be announced: {fault}; shorten "
                "its id, its address or its model's name"
            )
        return written

    def read(self, content: bytes) -> SignedEntry | str:
        """Return the entry, or why it does not count."""
        if len(content) > MAX_ENTRY_BYTES:
            return f"it is longer than {MAX_ENTRY_BYTES} bytes"
        try:
            found = json.loads(content)
            if not isinstance(found, dict) or _FIELDS.symmetric_difference(found):
                return "it is not an entry of this version"
            signature = str(found.pop("signature")).encode(errors="replace")
            if not any(
                hmac.compare_digest(signature, _signature(key, found).encode())
                for key in self._keys
            ):
                return "it is not signed with this cluster's token"
            entry = SignedEntry(WorkerRecord(**found.pop("record")), **found)
        except (ValueError, TypeError, RecursionError):
            return "it is not an entry of this version"
        return _fault(entry, len(content)) or entry


def _signature(key: bytes, content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True)
    return blake2b(text.encode(), key=key, digest_size=_SIGNATURE_BYTES).hexdigest()


def _fault(entry: SignedEntry, size: int) -> str | None:
    """Return why no process could use the entry, or None."""
    if (fault := record_fault(entry.record)) is not None:
        return fault
    try:
        check_worker_id(entry.record.worker_id)
    except ConfigError:
        return "its worker id is not made of letters, digits and '-'"
    if any(len(str(value)) > MAX_FIELD_CHARACTERS for value in asdict(entry.record).values()):
        return f"a field of it is longer than {MAX_FIELD_CHARACTERS} characters"
    for number in (entry.started, entry.counter):
        if type(number) is not int or not 0 <= number < _COUNTER_LIMIT:
            return "its counter is not a number of 63 bits"
    if type(entry.withdrawn) is not bool:
        return "a field of it is of another type"
    return f"it is longer than {MAX_ENTRY_BYTES} bytes" if size > MAX_ENTRY_BYTES else None
