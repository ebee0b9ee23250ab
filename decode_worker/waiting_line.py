"""The line of groups that wait for decode credit, in order of arrival, and who of it may go on.

    submit ─▶ ... oldest ─ credit, and a place in the batch ─▶ granted
                 ▲
                 └── taken back, preempted: in the place of its arrival

Decides by counting alone: it holds no blocks, and the scheduler reserves them. Owned by the
decode scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from baton.decode_worker import credit
from baton.decode_worker.sequences import Group, Sequence
from baton.engine.scheduling.blocks import BlockPool
from baton.runtime.config import StepConfig
from baton.runtime.errors import InvalidRequest, Overloaded

KNOWN = 32  # grants: whether only requests of several choices come
SHUT_OUT_S = 30.0  # a quarantine that lasts for so long may last for ever


class WaitingLine:
    def __init__(self, pool: BlockPool, config: StepConfig) -> None:
        self._pool = pool
        self._config = config
        self._groups: list[Group] = []  # oldest first
        self._singles: deque[bool] = deque([True], maxlen=KNOWN)  # of the last grants, which
        self._shut_out: dict[Group, float] = {}  # by the quarantine, since when

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def local_tokens(self) -> int:
        """Prompt tokens that are to be computed on this worker."""
        return sum(len(group.tokens) for group in self._groups if group.local)

    def check_room(self) -> None:
        """Raises Overloaded if the line is full."""
        if len(self._groups) >= self._config.max_queue:
            raise Overloaded(f"{len(self._groups)} requests wait for KV room on this worker")

    def join(self, group: Group) -> None:
        """At the end of the line. Raises InvalidRequest if the pool can never hold it."""
        request = group.request
        longest = credit.blocks_for(len(request.prompt) + request.max_tokens, self._pool.block_size)
        if (wanted := max(group.promised, longest)) > self._pool.total:
            raise InvalidRequest(
                f"the request needs {wanted} KV blocks and this worker's pool has "
                f"{self._pool.total}: shorten the prompt, lower max_tokens or n",
                field="max_tokens",
            )
        self._groups.append(group)

    def rejoin(self, group: Group) -> None:
        """What has been granted before waits again, in the place of its arrival."""
        place = sum(1 for other in self._groups if other.arrived_s <= group.arrived_s)
        self._groups.insert(place, group)

    def leave(self, group: Group) -> None:
        """It has been granted."""
        self._groups.remove(group)
        self._singles.append(len(group.request.sequences) == 1)

    def forget_ended(self) -> None:
        """Those that nobody wants any more."""
        self._groups = [group for group in self._groups if group.live]

    def next(self, running: Collection[Sequence], granted: Collection[Group]) -> Group | None:
        """The oldest; but one that even an empty pool could not hold beside its quarantine,
        which may last, keeps no other waiting, nor does one of several choices that have their
        share of the batch: but for others of several."""
        usable, held_back = self._usable_blocks, False
        for group in self._groups:
            several = len(group.sequences) > 1
            if group.promised > usable or several and held_back:
                continue
            if several and not self._room_for_choices(running, granted)(len(group.sequences)):
                held_back = True  # younger ones too: else those of fewer choices overtook for ever
                continue
            return group
        return None

    def _room_for_choices(
        self, running: Collection[Sequence], granted: Collection[Group]
    ) -> Callable[[int], bool]:
        """Whether a request of so many choices may be granted. One client asks for many of them at
        the price of one prompt: unless the last requests were all of several choices, such
        requests share a part of the batch; there is always room for one of them."""
        living = _living(running, granted)
        held = sum(len(sequence.request.sequences) > 1 for sequence in living)
        share = int(self._config.choices_share * self._config.max_sequences)
        all_several = not any(self._singles)
        return lambda count: all_several or held == 0 or held + count <= share

    def shut_out(self, now_s: float) -> list[Group]:
        """Those that an empty pool could not have held beside its quarantine for SHUT_OUT_S;
        to be asked often."""
        usable, before = self._usable_blocks, self._shut_out
        self._shut_out = {}
        if not self._groups or usable == self._pool.total:
            return []
        self._shut_out = {
            group: before.get(group, now_s) for group in self._groups if group.promised > usable
        }
        return [g for g, since_s in self._shut_out.items() if now_s - since_s >= SHUT_OUT_S]

    def has_credit(
        self, group: Group, running: Collection[Sequence], granted: Collection[Group]
    ) -> bool:
        """Whether it may be granted beside what runs and what has been granted before."""
        living = len(_living(running, granted))
        if living and living + len(group.sequences) > self._config.max_sequences:
            return False
        return credit.may_grant(
            group,
            running=running,
            waiting_grants=granted,
            usable_blocks=self._usable_blocks,
            waiting_share=self._config.waiting_share,
        )

    @property
    def _usable_blocks(self) -> int:
        return self._pool.total - self._pool.quarantined


def _living(running: Collection[Sequence], granted: Collection[Group]) -> list[Sequence]:
    sequences = [*running, *(s for before in granted for s in before.sequences)]
    return [sequence for sequence in sequences if not sequence.ended]
