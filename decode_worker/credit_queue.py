"""The queue of groups that wait for decode credit, in order of arrival.

    submit ─▶ ... oldest ─ credit, and room in the batch ─▶ granted
                 ▲
                 └── revoked or preempted: ordered by its arrival

The queue only counts: it holds no blocks, which the scheduler reserves. The decode scheduler owns
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from baton.decode_worker import credit
from baton.decode_worker.sequences import Group, Sequence
from baton.engine.scheduling.blocks import BlockPool
from baton.runtime.config import StepConfig
from baton.runtime.errors import InvalidRequest, Overloaded
from baton.runtime.worker.attention_pairs import causal_pairs

RECENT_GRANTS = 32  # show whether all requests have several choices
QUARANTINE_WAIT_S = 30.0  # a quarantine that lasts so long may never end


class CreditQueue:
    def __init__(self, pool: BlockPool, config: StepConfig) -> None:
        self._pool = pool
        self._config = config
        self._groups: list[Group] = []  # oldest first
        # whether each of the last grants had a single choice
        self._single_grants: deque[bool] = deque([True], maxlen=RECENT_GRANTS)
        self._blocked_since_s: dict[Group, float] = {}  # by the quarantine

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def local_tokens(self) -> int:
        """Count the prompt tokens that are to be computed on this worker."""
        return sum(len(group.tokens) for group in self._groups if group.local)

    @property
    def local_pairs(self) -> int:
        """Count the query-key pairs of the attention of `local_tokens`."""
        return sum(causal_pairs(0, len(group.tokens)) for group in self._groups if group.local)

    @property
    def wanted_blocks(self) -> int:
        """Count the blocks of credit that the groups wait for."""
        return sum(group.promised for group in self._groups)

    def check_room(self) -> None:
        """Raise Overloaded if the queue is full."""
        if len(self._groups) >= self._config.max_queue:
            raise Overloaded(f"{len(self._groups)} requests wait for KV room on this worker")

    def append(self, group: Group) -> None:
        """Queue a new group. Raises InvalidRequest if the pool can never hold it."""
        request = group.request
        longest = credit.blocks_for(len(request.prompt) + request.max_tokens, self._pool.block_size)
        if (wanted := max(group.promised, longest)) > self._pool.total:
            raise InvalidRequest(
                f"the request needs {wanted} KV blocks and this worker's pool has "
                f"{self._pool.total}: shorten the prompt, lower max_tokens or n",
                field="max_tokens",
            )
        self._groups.append(group)

    def requeue(self, group: Group) -> None:
        """Queue a group that was granted before, by the time of its arrival."""
        index = sum(1 for other in self._groups if other.arrived_s <= group.arrived_s)
        self._groups.insert(index, group)

    def remove_granted(self, group: Group) -> None:
        """Remove a group that has its credit now."""
        self._groups.remove(group)
        self._single_grants.append(len(group.request.sequences) == 1)

    def remove_ended(self) -> None:
        """Remove the groups whose sequences have all ended."""
        self._groups = [group for group in self._groups if group.live]

    def next(self, running: Collection[Sequence], granted: Collection[Group]) -> Group | None:
        """Return the oldest group that may be granted next. A group that does not fit beside the
        quarantine even in an empty pool blocks no other, since a quarantine may last. A group whose
        choices exceed their share of the batch blocks only other groups of several choices."""
        usable, held_back = self._usable_blocks, False
        for group in self._groups:
            several = len(group.sequences) > 1
            if group.promised > usable or several and held_back:
                continue
            if several and not self._room_for_choices(running, granted)(len(group.sequences)):
                held_back = True  # else groups of fewer choices would always overtake it
                continue
            return group
        return None

    def _room_for_choices(
        self, running: Collection[Sequence], granted: Collection[Group]
    ) -> Callable[[int], bool]:
        """Return a predicate: whether a request of so many choices may be granted. Several choices
        cost a client only one prompt. Such requests therefore share a part of the batch, unless all
        recent requests had several choices; one of them is always possible."""
        living = _living(running, granted)
        held = sum(len(sequence.request.sequences) > 1 for sequence in living)
        share = int(self._config.choices_share * self._config.max_sequences)
        all_several = not any(self._single_grants)
        return lambda count: all_several or held == 0 or held + count <= share

    def blocked_by_quarantine(self, now_s: float) -> list[Group]:
        """Return the groups that have not fitted beside the quarantine for QUARANTINE_WAIT_S, even
        in an empty pool. To be called often."""
        usable, before = self._usable_blocks, self._blocked_since_s
        self._blocked_since_s = {}
        if not self._groups or usable == self._pool.total:
            return []
        self._blocked_since_s = {
            group: before.get(group, now_s) for group in self._groups if group.promised > usable
        }
        return [
            group
            for group, since_s in self._blocked_since_s.items()
            if now_s - since_s >= QUARANTINE_WAIT_S
        ]

    def has_credit(
        self, group: Group, running: Collection[Sequence], granted: Collection[Group]
    ) -> bool:
        """Return whether a group may be granted beside the running sequences and older grants."""
        living = len(_living(running, granted))
        if living and living + len(group.sequences) > self._config.max_sequences:
            return False
        promised = credit.unallocated(running, granted) + group.promised
        if self._pool.pinned and promised > self._pool.available:
            return False  # blocks that readers of cached blocks pin are in no credit
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
