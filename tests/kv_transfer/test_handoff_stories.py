"""A handoff from opening to end, both ends real, pools and stream in memory, virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.kv_transfer.sum_cache import SumCache
from baton.runtime.errors import (
    ChecksumMismatch,
)


def test_all_blocks_arrive_verified_and_the_end_is_said(lab: Any) -> None:
    stage, prompt = lab.Stage(), lab.chunked()
    report, loop = lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert lab.moved(stage, lab.OWN, lab.THEIRS)
    assert report.reads == 3 and report.bytes == 6 * lab.BLOCK_BYTES and report.rereads == 0
    assert report.opened <= report.first_offer <= report.last_offer <= report.verified
    assert report.seconds == pytest.approx(0.15)
    assert len(stage.first) == 1 and not stage.quarantined
    assert stage.sent[0] == "open" and stage.sent[-1] == "closed"
    assert stage.reports[0].end == "closed" and stage.reports[0].offered_blocks == 6
    assert prompt.ended_at == [pytest.approx(loop.time())]  # unpinned at once, not at lease end
    lab.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    ("read_blocks", "sizes"), [(4, [3, 3]), (5, [3, 3]), (6, [6]), (100, [6]), (0.5, [1] * 6)]
)
def test_reads_are_of_even_size_and_at_most_so_many_bytes(
    lab: Any, read_blocks: float, sizes: list[int]
) -> None:
    seen: list[int] = []

    def decide(attempt: Attempt) -> Fate:
        seen.append(len(attempt.local))
        return Fate()

    stage = lab.Stage(decide, read_bytes=int(read_blocks * lab.BLOCK_BYTES), window_reads=6)
    prompt = lab.ScriptedPrompt([lab.computed(0, lab.THEIRS), lab.first_tokens()])
    lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert lab.moved(stage, lab.OWN, lab.THEIRS)
    assert seen == sizes


def test_first_tokens_do_not_wait_for_the_last_blocks(lab: Any) -> None:
    stage = lab.Stage(decide=lambda attempt: Fate(delay_s=0.5))
    prompt = lab.chunked()
    report, _ = lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert report.first_tokens < report.verified - 0.4
    lab.nothing_left(stage, prompt)


def test_a_partial_last_block_and_a_held_prefix(lab: Any) -> None:
    stage = lab.Stage()
    prompt = lab.ScriptedPrompt(
        [  # the granter offers from its cache what the reader holds already, too
            lab.computed(0, lab.THEIRS[:4]),
            lab.computed(4, lab.THEIRS[4:5]),
            lab.computed(5, lab.THEIRS[5:], partial=3),
            lab.first_tokens(),
        ]
    )
    lab.on_virtual_time(lambda: lab.play(stage, prompt, held=2, partial=3))
    assert lab.moved(stage, lab.OWN[2:], lab.THEIRS[2:])
    assert not stage.own[lab.OWN[:2]].any()  # what is held was not read
    assert stage.reports[0].offered_blocks == 4
    lab.nothing_left(stage, prompt)


def test_a_slow_granter_is_waited_for_as_long_as_the_lease_is_renewed(lab: Any) -> None:
    stage, prompt = lab.Stage(), lab.chunked(pause=30.0)
    report, _ = lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert report.seconds == pytest.approx(90.0)
    assert stage.sent.count("renew") >= 90 / stage.config.lease_s * 4 - 1
    lab.nothing_left(stage, prompt)


def test_reads_stay_inside_the_window(lab: Any) -> None:
    flying: set[int] = set()
    most: list[int] = []

    def decide(attempt: Attempt) -> Fate:
        flying.add(attempt.number)
        most.append(len(flying))
        asyncio.get_running_loop().call_later(0.099, flying.discard, attempt.number)
        return Fate(delay_s=0.1)

    stage = lab.Stage(decide, read_bytes=1, window_reads=3, window_bytes=2 * lab.BLOCK_BYTES)
    prompt = lab.ScriptedPrompt([lab.computed(0, lab.THEIRS), lab.first_tokens()])
    report, _ = lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert max(most) == 2 and report.reads == 6
    lab.nothing_left(stage, prompt)


def test_two_readers_share_a_prefix_and_its_sums(lab: Any) -> None:
    stage = lab.Stage()
    stage.sums = SumCache()
    summed: list[int] = []
    plain = stage.granter.checksums

    async def counting(blocks: Any, seeds: Any) -> Any:
        summed.extend(blocks)
        return await plain(blocks, seeds)

    stage.granter.checksums = counting
    prompts = [lab.chunked(), lab.chunked()]
    other = [block + 1 for block in (12, 13, 14, 15, 16, 17)]

    async def both() -> None:
        names = [lab.name_of(place) for place in range(6)]
        await asyncio.gather(
            *(
                stage.fetch(stage.granter_link(prompt), stage.opening(), own, names)
                for prompt, own in zip(prompts, (lab.OWN, other), strict=True)
            )
        )
        await stage.ended()
        await lab.play(stage, lab.chunked())

    lab.on_virtual_time(both)
    assert lab.moved(stage, lab.OWN, lab.THEIRS) and lab.moved(stage, other, lab.THEIRS)
    assert len(summed) <= 12 and len(stage.sums) == 6  # the third handoff summed nothing
    lab.nothing_left(stage, *prompts)


def test_a_block_corrupted_once_is_read_again(lab: Any) -> None:
    stage = lab.Stage(decide=lambda attempt: Fate(corrupt=1 if attempt.number == 2 else None))
    prompt = lab.chunked()
    report, _ = lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert lab.moved(stage, lab.OWN, lab.THEIRS)
    assert report.rereads == 1 and report.reads == 4
    assert report.bytes == 7 * lab.BLOCK_BYTES  # the one wrong block alone was read again
    lab.nothing_left(stage, prompt)


def test_a_block_corrupted_twice_ends_the_handoff(lab: Any) -> None:
    def decide(attempt: Attempt) -> Fate:
        return Fate(corrupt=attempt.remote.index(7) if 7 in attempt.remote else None)

    stage, prompt = lab.Stage(decide), lab.chunked()

    async def main() -> None:
        with pytest.raises(ChecksumMismatch, match="block 7 .* place 3"):
            await lab.play(stage, prompt)

    lab.on_virtual_time(main)
    assert stage.sent[-1] == "closed"
    lab.nothing_left(stage, prompt)


def test_without_verification_a_wrong_block_passes(lab: Any) -> None:
    """The one test in which a fault must not be seen: it shows that the sums see it above."""
    stage = lab.Stage(decide=lambda attempt: Fate(corrupt=0), verify=False)
    prompt = lab.chunked()
    lab.on_virtual_time(lambda: lab.play(stage, prompt))
    assert not lab.moved(stage, lab.OWN, lab.THEIRS)
    lab.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    "wrong", ["identity", "stale"], ids=["another identity", "rewritten after the sums"]
)
def test_a_block_that_is_not_the_wanted_one_is_refused(lab: Any, wrong: str) -> None:
    def decide(attempt: Attempt) -> Fate:
        if wrong == "stale":
            late = asyncio.get_running_loop().call_later
            late(0.1, lambda: stage.granted[lab.THEIRS[2]].fill(attempt.number))
        return Fate(delay_s=0.2)

    stage, prompt = lab.Stage(decide), lab.chunked()

    async def main() -> None:
        names = [lab.name_of(place) for place in range(6)]
        if wrong == "identity":
            names[2] = b"other" * 4
        with pytest.raises(ChecksumMismatch):
            await stage.fetch(stage.granter_link(prompt), stage.opening(), lab.OWN, names)
        await stage.ended()

    lab.on_virtual_time(main)
    lab.nothing_left(stage, prompt)
