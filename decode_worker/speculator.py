"""The proposals of each step: how many, of which tokens, and how many the target accepted.

    plan     lengths by the policy ─▶ tokens of the proposer ─▶ slices that verify them
    commit   accepted of proposed ─▶ policy, metrics

A step that verifies is planned with no step under way: what it proposes follows the last token of
each sequence. So the loop waits with the next plan only where a sequence has something to propose.
While speculation does not pay, no proposer is asked and nothing is kept for a new sequence.
Knows no blocks and no clock. Owned by the decode scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from baton.decode_worker.draft_progress import Drafting
from baton.decode_worker.sequences import Proposals, Sequence
from baton.decode_worker.step_plan import VerifiedRun
from baton.engine.scheduling.batch import Drawn, Slice, StepBatch, StepResult
from baton.engine.scheduling.verification import with_proposals
from baton.engine.speculation.draft_length import DraftLengthPolicy
from baton.engine.speculation.proposer import Proposer, ProposerState
from baton.runtime import logs, metrics

WINDOW_PROPOSALS = 256
LOW_SHARE = 0.05

log = logs.get(__name__)


class AcceptanceWatch:
    """Counts proposals in windows. Of consecutive windows with a low share, it reports the second,
    fourth, eighth and so on."""

    def __init__(self) -> None:
        self._proposed = self._accepted = 0  # of the window
        self._low_windows = 0  # in a row

    def add(self, *, proposed: int, accepted: int) -> float | None:
        """Count proposals; return the accepted share of a window that should be reported."""
        self._proposed += proposed
        self._accepted += accepted
        if self._proposed < WINDOW_PROPOSALS:
            return None
        share = self._accepted / self._proposed
        self._proposed = self._accepted = 0
        self._low_windows = self._low_windows + 1 if share < LOW_SHARE else 0
        reported = self._low_windows >= 2 and self._low_windows.bit_count() == 1
        return share if reported else None


# Rows of a step up to which proposals are added: graphs and the buffers of split decode end there.
PROPOSED_ROWS = 256


class Speculator:
    """`longest`: tokens that are proposed for one sequence in a step, at most. Without a `proposer`
    the engine's draft model or EAGLE-3 head proposes, within the step: `drafting` says which."""

    def __init__(
        self, proposer: Proposer | None, longest: int, drafting: Drafting = "draft"
    ) -> None:
        self._proposer = proposer
        self.drafting: Drafting = "none" if proposer is not None else drafting
        self._longest = longest
        self._policy = DraftLengthPolicy(longest)
        self._watch = AcceptanceWatch()
        self._chosen = False  # lengths of the next step
        self.looked = False  # for proposals, when the newest step was planned
        self._verified = False  # the last step did
        self._name = name = drafting if proposer is None else proposer.name
        self._proposed = metrics.PROPOSED_TOKENS.labels(name)
        self._accepted = metrics.ACCEPTED_TOKENS.labels(name)

    def should_wait(self, sequences: Seq[Sequence]) -> bool:
        """Return whether the next step should be planned after the one under way, because it will
        have something to verify."""
        self.looked = self._choose(sequences)
        self._chosen = self.looked and any(map(self._expects, sequences))
        return self._chosen

    def slices(self, sequences: Seq[Sequence], lend: Callable[[Sequence, int], int]) -> list[Slice]:
        """Return the slice of each sequence, of which no step is under way, with its proposals.
        `lend` gives blocks for so many, and returns for how many there are some."""
        if not self._chosen:
            self.looked = self._choose(sequences)
        self._chosen = False
        if not self.looked:
            return [sequence.next_slice() for sequence in sequences]
        rows = len(sequences)
        slices = []
        for sequence in sequences:
            if self._proposer is None:
                slices.append(self._draft_slice(sequence, PROPOSED_ROWS - rows, lend))
                work = slices[-1].draft
                rows += 0 if work is None else work.tokens
                continue
            tokens = self._proposals(sequence, PROPOSED_ROWS - rows)
            if tokens:
                tokens = tokens[: lend(sequence, len(tokens))]
            rows += len(tokens)
            slices.append(sequence.verification_slice(tokens) if tokens else sequence.next_slice())
        return slices

    def judge(
        self,
        sequence: Sequence,
        item: Slice,
        drawn: tuple[Drawn, ...],
        drafted: tuple[int, ...] | None = None,
    ) -> VerifiedRun:
        """Take the target's draws of a slice that verified: the tokens that the sequence gets.
        `drafted`: the proposals of a draft model, which the planned slice does not have."""
        if drafted is not None:
            item = with_proposals(item, drafted)
        kept, proposals = sequence.until_end(drawn), item.tokens[1:]
        accepted = _accepted(proposals, kept)
        own = self._own(sequence)
        own.proposed, own.accepted = own.proposed + item.proposed, own.accepted + accepted
        # What an end cuts off says nothing of the proposer.
        self._policy.record(own.draft, item.proposed, _accepted(proposals, drawn))
        self._proposed.inc(item.proposed)
        self._accepted.inc(accepted)
        metrics.PROPOSED_DRAFT_TOKENS.observe(item.proposed)
        metrics.ACCEPTED_DRAFT_TOKENS.observe(accepted)
        share = self._watch.add(proposed=item.proposed, accepted=accepted)
        if share is not None:
            log.warning(
                "proposals seldom accepted",
                proposer=self._name,
                accepted_share=round(share, 4),
                detail="few proposals are accepted: another worker.speculate may fit this traffic",
            )
        return VerifiedRun(sequence, kept, item.proposed, accepted)

    def observe_result(self, batch: StepBatch, result: StepResult, *, looked: bool) -> None:
        """Take the times of a step that computed no chunk of a prompt. `looked`: as it was when the
        step was planned. A step that verifies is not planned ahead, so that the host's work and the
        proposer's add to the device's time: what passes between two ends counts, where it is known.
        Nor is the step after it, which is not the price of a plain step: the device's time counts,
        unless it looked for proposals itself."""
        drafts = [len(tokens) for tokens in result.proposed.values()]
        rows = sum(len(item.tokens) for item in batch.slices) + sum(drafts)
        verified = any(drafts) or any(item.proposed for item in batch.slices)
        after, self._verified = self._verified, verified
        device_s, interval_s = result.device_s, result.interval_s
        all_s = device_s if interval_s is None else interval_s
        step_s = all_s if verified or not after else device_s
        self.observe_step(rows, step_s - result.draft_s)
        if result.draft_s > 0 and any(drafts):
            self._policy.observe_draft(len(drafts), max(drafts), result.draft_s)
        yield_s = all_s if looked else step_s
        if yield_s > 0:
            tokens = sum(map(len, result.drawn))
            sequences = len(batch.slices)
            if self._policy.observe_yield(sequences, tokens, yield_s, looked=looked):
                metrics.SPECULATION_PAUSES.inc()

    def observe_step(self, rows: int, target_s: float) -> None:
        """Take the time of the target in a step of so many rows."""
        if target_s > 0:
            self._policy.observe_step(rows, target_s)

    def end(self, sequence: Sequence) -> None:
        """Release what is kept of a sequence, which has ended. Idempotent."""
        own = sequence.proposals
        if own is not None and own.state is not None:
            self._state(sequence, own).close()
            own.state = None

    def _choose(self, sequences: Seq[Sequence]) -> bool:
        """Write the length that is wanted of each sequence's draft; return whether one is."""
        if not self._policy.may_propose(len(sequences)):
            return False
        owns = [self._own(sequence) for sequence in sequences]
        limits = [max(0, s.growth_left - s.under_way - 1) for s in sequences]
        lengths = self._policy.choose([own.draft for own in owns], limits)
        for own, length in zip(owns, lengths, strict=True):
            own.wanted = length
        return any(lengths)

    def _expects(self, sequence: Sequence) -> bool:
        """Return whether a draft is wanted of a sequence, and its proposer would have one."""
        own = self._own(sequence)
        if self._proposer is None:
            return own.wanted > 0
        return own.wanted > 0 and bool(self._state(sequence, own).propose(1))

    def _draft_slice(
        self, sequence: Sequence, rows: int, lend: Callable[[Sequence, int], int]
    ) -> Slice:
        own = self._own(sequence)
        limit, own.wanted = min(own.wanted, sequence.growth_left - 1, rows), 0
        count = lend(sequence, limit) if limit > 0 else 0
        return sequence.draft_slice(count) if count > 0 else sequence.next_slice()

    def _proposals(self, sequence: Sequence, rows: int) -> list[int]:
        """Return the tokens to propose, for which the step has so many `rows` left."""
        own = self._own(sequence)
        limit, own.wanted = min(own.wanted, sequence.growth_left - 1, rows), 0
        return self._state(sequence, own).propose(limit)[:limit] if limit > 0 else []

    def _own(self, sequence: Sequence) -> Proposals:
        if sequence.proposals is None:
            sequence.proposals = Proposals(self._policy.start())
        return sequence.proposals

    def _state(self, sequence: Sequence, own: Proposals) -> ProposerState:
        """Return the proposer's state, with all tokens of the sequence."""
        assert self._proposer is not None
        known, length = own.known, sequence.length
        if own.state is None:
            tokens = sequence.span(0, length)
            own.state = self._proposer.start(sequence.request.tenant, tokens)
        elif known < length:
            own.state.extend(sequence.span(known, length))
        own.known = length
        return own.state


def _accepted(proposals: Seq[int], drawn: Seq[Drawn]) -> int:
    """Return how many of the drawn tokens are proposals."""
    return sum(token == each.token for token, each in zip(proposals, drawn, strict=False))
