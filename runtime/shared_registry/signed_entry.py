"""The entry of one worker in a shared registry: what it says, its age, and its signature.

Every process that can write to the registry's server can write an entry, so an entry counts only
if it carries the signature of one of the cluster's tokens. The counter rises with each
announcement of a boot: a copy of an old entry is recognised by it. Pure; holds no state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from baton.runtime.errors import ConfigError
from baton.runtime.registry import WorkerRecord, check_worker_id, record_fault
from baton.runtime.shared_registry.signed_json import SignedJson

MAX_ENTRY_BYTES = 8192
MAX_FIELD_CHARACTERS = 1024
_COUNTER_LIMIT = 1 << 63
_FIELDS = frozenset(("record", "started", "counter", "withdrawn"))


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
        self.texts = SignedJson(tokens, b"baton-members", _FIELDS, MAX_ENTRY_BYTES, "entry")

    def write(self, entry: SignedEntry) -> bytes:
        """Return the entry as bytes with its signature. Raises ConfigError for a record that
        `read` would refuse."""
        written = self.texts.write(asdict(entry))
        if (fault := _fault(entry, len(written))) is not None:
            raise ConfigError(
                f"worker {entry.record.worker_id[:100]} cannot be announced: {fault}; shorten "
                "its id, its address or its model's name"
            )
        return written

    def read(self, content: bytes) -> SignedEntry | str:
        """Return the entry, or why it does not count."""
        found = self.texts.read(content)
        if isinstance(found, str):
            return found
        try:
            entry = SignedEntry(WorkerRecord(**found.pop("record")), **found)
        except TypeError:
            return "its record is not one of this version"
        return _fault(entry, len(content)) or entry


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
