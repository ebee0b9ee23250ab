"""Breaks: one piece of the product replaced for the length of a run, and what that proves.

A break that does not fit the product any more raises where it is called, and whatever hangs on
it fails: that proves nothing, and is reported separately. The breaks themselves are in mutations.py
and regressions.py.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from baton.runtime.errors import BatonError
from baton.runtime.links import LinkClosed

Mutation = Callable[[], AbstractContextManager[None]]

_ENDED = re.compile(r"^the lab raised |^\S+ raised |: its (loop|fleet) has ended: ")
_STUCK = re.compile(r"^(nothing can happen any more|\S+ s have passed); waiting: ")


class Misfit(RuntimeError):
    """A break raised by itself: it was written for another product."""


@dataclass(frozen=True, slots=True)
class Break:
    """`make` gets what stands at `owner.name` and gives what is to stand there."""

    what: str
    owner: Any
    name: str
    make: Callable[[Any], Any]


def always(value: Any) -> Callable[[Any], Any]:
    """A method that does nothing but give a value."""
    return lambda before: lambda *_, **__: value


@contextmanager
def applied(broken: Break) -> Iterator[None]:
    """Raises Misfit at the end if the break's own code failed in between, however the product took
    it."""
    failed_patches: list[Exception] = []
    before = broken.owner.__dict__[broken.name]
    setattr(broken.owner, broken.name, _watched(broken.make(before), failed_patches))
    try:
        yield
    finally:
        setattr(broken.owner, broken.name, before)
    if failed_patches:
        raise Misfit(f"the break {broken.what!r} does not fit the product: {failed_patches[0]!r}")


def broken_promises(breaches: Sequence[str]) -> list[str]:
    """The breaches without those that only say that something raised, ended or stood still."""
    return [one for one in breaches if not _ENDED.search(one) and not _STUCK.search(one)]


def _watched(made: Any, failed_patches: list[Exception]) -> Any:
    if not inspect.isfunction(made):
        return made
    if inspect.iscoroutinefunction(made):

        @functools.wraps(made)
        async def work(*args: Any, **named: Any) -> Any:
            try:
                return await made(*args, **named)
            except Exception as error:
                # The error is noted and raised again, whatever it is.
                _note(error, made, failed_patches)
                raise

        return work

    @functools.wraps(made)
    def call(*args: Any, **named: Any) -> Any:
        try:
            return made(*args, **named)
        except Exception as error:
            # The error is noted and raised again, whatever it is.
            _note(error, made, failed_patches)
            raise

    return call


def _note(error: Exception, made: Any, failed_patches: list[Exception]) -> None:
    """If it was raised in the break, or by calling it or calling from it with other arguments:
    what is raised deeper is what the product makes of it, and so is an error of the product's own
    tree that the break raises in its place, and what it asserts."""
    if isinstance(error, AssertionError | BatonError | LinkClosed):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    own = {__file__, inspect.unwrap(made).__code__.co_filename}
    if trace is not None and trace.tb_frame.f_code.co_filename in own:
        failed_patches.append(error)
