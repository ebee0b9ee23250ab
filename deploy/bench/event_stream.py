"""Server-sent events out of the pieces in which they arrive.

    data: {"choices": ...}      one field, the usual case
                                an empty line ends the event

Lines end with LF, CRLF or CR, and several `data` lines of one event are joined, as the WHATWG's
HTML standard defines it. Other fields and comments (keep-alives) are skipped. Pure.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 64 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventStream:
    """The parser of one stream. An event that no empty line ended is never returned."""

    def __init__(self) -> None:
        self._rest = b""
        self._begun = False
        self._after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that end in this piece. Raises ValueError if an event is
        larger than MAX_EVENT_BYTES."""
        if not self._begun:
            self._begun = True
            piece = piece.removeprefix(BYTE_ORDER_MARK)
        if self._after_cr and piece:
            piece = piece.removeprefix(b"\n")
            self._after_cr = False
        if b"\r" in piece:
            self._after_cr = piece.endswith(b"\r")
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        events = (self._rest + piece).split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    """Return an event's data; None if it has none."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    values = [
        value.removeprefix(b" ")
        for name, _, value in (line.partition(b":") for line in event.split(b"\n"))
        if name == b"data"
    ]
    return b"\n".join(values) if values else None
