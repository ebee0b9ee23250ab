"""A granted prompt for a reader with another KV dtype: its blocks are converted, then offered.

    prompt ─▶ blocks, with targets ─▶ convert in the checksums' thread ─▶ converted blocks ─▶ offer
         └▶ first tokens: at once           └ end: targets are unpinned once no call writes there

It wraps what either role grants. The prompt reserves the targets, pinned from then on, before it
offers: a conversion never waits for blocks. What is offered, tagged and checksummed is the
converted block. The worker's loop owns it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from baton.kv_transfer.checksum import block_seed, converted_tag, partial_tag
from baton.kv_transfer.conversion import Conversion, Conversions
from baton.kv_transfer.granter import Computed, Granted, GrantedPrompt
from baton.kv_transfer.mover import Mover
from baton.proto import handoff_pb2
from baton.runtime import handoff_metrics
from baton.runtime.config import HandoffConfig
from baton.runtime.errors import Incompatible
from baton.runtime.wire import ModelLimits

# One thread converts KV, at 0.13 GB/s or more, and computes the checksums of all other handoffs:
# it does so between two calls.
CALLS_PER_READ = 8


T = TypeVar("T")


class ConvertiblePrompt(GrantedPrompt, Protocol):
    """A prompt that reserves targets. `targets` are those of all blocks that it has offered."""

    request_id: str
    targets: list[int]


Unpin = Callable[[list[int]], None]


class Converter:
    """The conversions of one worker. `unpin` releases targets; `on_unpin` is called when that was
    after the end of their handoff."""

    def __init__(
        self,
        conversions: Conversions,
        limits: ModelLimits,
        mover: Mover,
        boot_id: bytes,
        config: HandoffConfig,
        *,
        unpin: Unpin,
        on_unpin: Callable[[], None],
    ) -> None:
        self.kv_dtype = limits.kv_dtype
        self.mover = mover
        self.boot_id = boot_id
        self.call_bytes = config.read_bytes // CALLS_PER_READ
        self.unpin = unpin
        self.on_unpin = on_unpin
        self._conversions = conversions
        self._known: dict[str, Conversion] = {}

    def conversion(self, opening: handoff_pb2.OpenHandoff) -> Conversion | None:
        """Return the conversion that the reader of an opening needs; None: it stores KV as this
        worker does. Raises Incompatible, which names both."""
        wanted = opening.kv_dtype
        if not wanted or wanted == self.kv_dtype:
            return None
        found = self._known.get(wanted) or self._conversions(wanted)
        if found is None:
            raise Incompatible(
                f"the reader's kv_dtype is {wanted!r}, and {self.kv_dtype!r} here is not converted "
                "to it: set pool.kv_dtype of both workers to the same"
            )
        self._known[wanted] = found
        return found

    def parts(self, opening: handoff_pb2.OpenHandoff) -> int:
        """Return the targets that one block needs; 0: none is converted. Raises Incompatible."""
        conversion = self.conversion(opening)
        return 0 if conversion is None else conversion.parts

    def granted(self, prompt: ConvertiblePrompt, opening: handoff_pb2.OpenHandoff) -> GrantedPrompt:
        """Return the prompt as its reader can read it."""
        conversion = self.conversion(opening)
        if conversion is None:
            return prompt
        return ConvertedPrompt(prompt, self, conversion, opening.handoff_id)


class ConvertedPrompt:
    """Implements `GrantedPrompt`: the blocks of `prompt`, converted."""

    def __init__(
        self,
        prompt: ConvertiblePrompt,
        converter: Converter,
        conversion: Conversion,
        handoff_id: bytes,
    ) -> None:
        self.request_id = prompt.request_id
        self.pinned: list[int] = []  # targets that are offered, or about to be
        self.on_end: Callable[[ConvertedPrompt], None] = ConvertedPrompt._end
        self._prompt = prompt
        self._converter = converter
        self._conversion = conversion
        self._handoff_id = handoff_id
        each_bytes = max(conversion.block_bytes, converter.mover.block_bytes)
        self._most = max(1, converter.call_bytes // each_bytes)
        self._waiting: deque[Computed] = deque()
        self._call: asyncio.Task[NDArray[np.uint64]] | None = None
        self._converting: asyncio.Task[Computed] | None = None
        self._asking: asyncio.Task[Granted | None] | None = None  # the prompt, for its next event
        self._over = False  # it has no more events

    async def next(self) -> Granted | None:
        """Return the next converted part, or what needs no conversion as soon as it is there: a
        prompt's first tokens come behind its last chunk, and wait for no conversion of it."""
        while True:
            if self._converting is None and self._waiting:
                self._converting = _task(self._converted(self._waiting.popleft()))
            if self._asking is None and not self._over:
                self._asking = _task(self._prompt.next())
            tasks = {task for task in (self._asking, self._converting) if task is not None}
            if not tasks:
                return None
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._asking is not None and self._asking.done():
                asked, self._asking = self._asking, None
                item = asked.result()
                self._over = item is None
                if isinstance(item, Computed):
                    self._waiting.extend(item.parts(self._most))
                elif item is not None:
                    return item
            elif self._converting is not None:
                converted, self._converting = self._converting, None
                return converted.result()

    def end(self) -> None:
        self.on_end(self)

    def _end(self) -> None:
        for task in (self._asking, self._converting):
            if task is not None:
                task.cancel()  # one that has not begun begins no call
        self._prompt.end()
        if self._call is None or self._call.done():
            self._unpin()
        else:  # the thread may still write into them
            self._call.add_done_callback(self._call_ended)

    def _call_ended(self, _: asyncio.Task[NDArray[np.uint64]]) -> None:
        self._unpin()
        self._converter.on_unpin()

    def _unpin(self) -> None:
        targets, self._prompt.targets = self._prompt.targets, []
        self.pinned = []
        self._converter.unpin(targets)

    async def _converted(self, part: Computed) -> Computed:
        each, converter = self._conversion.parts, self._converter
        if part.partial_tokens:
            tags = [partial_tag(self._handoff_id, part.partial_tokens)]
        else:
            tags = [converted_tag(name, self._conversion.kv_dtype) for name in part.identities]
        seeds = [
            block_seed(converter.boot_id, target, tag)
            for target, tag in zip(part.targets[::each], tags, strict=True)
        ]
        convert = partial(self._conversion.convert, part.blocks, part.targets, seeds)
        self.pinned += part.targets
        self._call = asyncio.create_task(converter.mover.compute(convert))
        self._call.add_done_callback(lambda over: over.cancelled() or over.exception())
        checksums = await asyncio.shield(self._call)  # the thread does not stop
        handoff_metrics.CONVERTED_BLOCKS.inc(len(part.blocks))
        return replace(part, blocks=part.targets, targets=(), each=each, checksums=checksums)


def _task(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Return a task of the work. If the handoff ends before, its exception has no reader."""
    made = asyncio.create_task(work)
    made.add_done_callback(lambda over: over.cancelled() or over.exception())
    return made
