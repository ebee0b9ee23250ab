"""The report of one router to the others: circuits that it holds open, and recent placements.

A report counts only with the signature of one of the cluster's tokens, like an entry of the
registry. Its counter is the router's wall clock in nanoseconds and rises with each report, so a
copy is recognised, and an old one by its age. Pure; holds no state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from baton.runtime.shared_registry.signed_json import SignedJson

MAX_REPORT_BYTES = 32768
MAX_BOOTS = 256  # workers of each list
MAX_COUNT = 1 << 31
MAX_HOST = 253  # characters of a host's name
_COUNTER_LIMIT = 1 << 63
_HEX_DIGITS = 32  # of a boot id
_FIELDS = frozenset(("router", "counter", "open", "placed", "host"))


@dataclass(frozen=True, slots=True)
class RouterReport:
    """`router` and workers are boot ids in hex. `open`: workers whose circuit this router holds
    open since they failed its requests. `placed`: workers, with the requests and tokens that it
    sent there since the worker's last load report. `host`: the name of the router's host, for
    `baton cluster status`."""

    router: str
    counter: int
    open: tuple[str, ...] = ()
    placed: tuple[tuple[str, int, int], ...] = ()
    host: str = ""


class ReportSigner:
    """Signs with the first of `tokens`; accepts the signatures of all of them."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self.texts = SignedJson(tokens, b"baton-routers", _FIELDS, MAX_REPORT_BYTES, "report")

    def write(self, report: RouterReport) -> bytes:
        """Return the report as bytes with its signature; of each list the first MAX_BOOTS."""
        content = asdict(report)
        content["open"] = list(report.open[:MAX_BOOTS])
        content["placed"] = [list(each) for each in report.placed[:MAX_BOOTS]]
        return self.texts.write(content)

    def read(self, content: bytes) -> RouterReport | str:
        """Return the report, or why it does not count."""
        found = self.texts.read(content)
        if isinstance(found, str):
            return found
        return _checked(found) or "a field of it cannot be true"


def _checked(found: dict[str, object]) -> RouterReport | None:
    router, counter, opened, placed, host = (
        found[name] for name in ("router", "counter", "open", "placed", "host")
    )
    if not (_is_boot(router) and isinstance(opened, list) and isinstance(placed, list)):
        return None
    if not _is_count(counter, _COUNTER_LIMIT) or max(len(opened), len(placed)) > MAX_BOOTS:
        return None
    if not (isinstance(host, str) and len(host) <= MAX_HOST):
        return None
    if not all(_is_boot(each) for each in opened):
        return None
    for each in placed:
        if not (isinstance(each, list) and len(each) == 3 and _is_boot(each[0])):
            return None
        if not all(_is_count(count, MAX_COUNT) for count in each[1:]):
            return None
    return RouterReport(
        str(router),
        int(str(counter)),
        tuple(map(str, opened)),
        tuple((str(boot), int(requests), int(tokens)) for boot, requests, tokens in placed),
        host,
    )


def _is_boot(value: object) -> bool:
    if not isinstance(value, str) or len(value) != _HEX_DIGITS:
        return False
    return all(digit in "0123456789abcdef" for digit in value)


def _is_count(value: object, limit: int) -> bool:
    return type(value) is int and 0 <= value < limit
