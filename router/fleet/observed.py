"""A field of an object whose changes are told to the object itself, as `note_change`.

So who keeps something that was made of such fields need not trust that each assignment elsewhere
also tells of it. Knows nothing of the objects.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar, cast, overload

_T = TypeVar("_T")


class Observer(Protocol):
    def note_change(self) -> None: ...


class Observed(Generic[_T]):
    """The same object again is no change; what is changed inside a value is not seen."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_observed_{name}"

    @overload
    def __get__(self, of: None, owner: type) -> Observed[_T]: ...

    @overload
    def __get__(self, of: Observer, owner: type) -> _T: ...

    def __get__(self, of: Observer | None, owner: type) -> Observed[_T] | _T:
        return self if of is None else cast(_T, of.__dict__[self._name])

    def __set__(self, of: Observer, value: _T) -> None:
        if of.__dict__.get(self._name, self) is not value:
            of.__dict__[self._name] = value
            of.note_change()
