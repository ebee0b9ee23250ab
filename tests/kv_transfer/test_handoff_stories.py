"""A handoff from opening to end, both ends real, pools and stream in memory, virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from baton.kv_transfer.checksum_cache import ChecksumCache
from baton.kv_transfer.memory_mover import Attempt, Fate
from baton.runtime.errors import (
    ChecksumMismatch,
)
from tests.support import handoff_stage


def test_all_blocks_arrive_verified_and_the_end_is_said() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked()
    report, loop = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert handoff_stage.moved(stage, handoff_stage.OWN, handoff_stage.THEIRS)
    assert (
        report.reads == 3 and report.bytes == 6 * handoff_stage.BLOCK_BYTES and report.rereads == 0
    )
    assert report.opened <= report.first_offer <= report.last_offer <= report.verified
    assert report.seconds == pytest.approx(0.15)
    assert len(stage.first) == 1 and not stage.quarantined
    assert stage.sent[0] == "open" and stage.sent[-1] == "closed"
    assert stage.reports[0].end == "closed" and stage.reports[0].offered_blocks == 6
    assert prompt.ended_at == [pytest.approx(loop.time())]  # unpinned at once, not at lease end
    handoff_stage.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    ("read_blocks", "sizes"), [(4, [3, 3]), (5, [3, 3]), (6, [6]), (100, [6]), (0.5, [1] * 6)]
)
def test_reads_are_of_even_size_and_at_most_so_many_bytes(
    read_blocks: float, sizes: list[int]
) -> None:
    seen: list[int] = []

    def decide(attempt: Attempt) -> Fate:
        seen.append(len(attempt.local))
        return Fate()

    stage = handoff_stage.Stage(
        decide, read_bytes=int(read_blocks * handoff_stage.BLOCK_BYTES), window_reads=6
    )
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, handoff_stage.THEIRS), handoff_stage.first_tokens()]
    )
    handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert handoff_stage.moved(stage, handoff_stage.OWN, handoff_stage.THEIRS)
    assert seen == sizes


def test_first_tokens_do_not_wait_for_the_last_blocks() -> None:
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(delay_s=0.5))
    prompt = handoff_stage.chunked()
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert report.first_tokens < report.verified - 0.4
    handoff_stage.nothing_left(stage, prompt)


def test_a_partial_last_block_and_a_held_prefix() -> None:
    stage = handoff_stage.Stage()
    prompt = handoff_stage.ScriptedPrompt(
        [  # the granter offers from its cache what the reader holds already, too
            handoff_stage.computed(0, handoff_stage.THEIRS[:4]),
            handoff_stage.computed(4, handoff_stage.THEIRS[4:5]),
            handoff_stage.computed(5, handoff_stage.THEIRS[5:], partial=3),
            handoff_stage.first_tokens(),
        ]
    )
    handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt, held=2, partial=3))
    assert handoff_stage.moved(stage, handoff_stage.OWN[2:], handoff_stage.THEIRS[2:])
    assert not stage.own[handoff_stage.OWN[:2]].any()  # what is held was not read
    assert stage.reports[0].offered_blocks == 4
    handoff_stage.nothing_left(stage, prompt)


def test_a_slow_granter_is_awaited_while_the_lease_is_renewed() -> None:
    stage, prompt = handoff_stage.Stage(), handoff_stage.chunked(pause=30.0)
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert report.seconds == pytest.approx(90.0)
    assert stage.sent.count("renew") >= 90 / stage.config.lease_s * 4 - 1
    handoff_stage.nothing_left(stage, prompt)


def test_reads_stay_inside_the_window() -> None:
    flying: set[int] = set()
    most: list[int] = []

    def decide(attempt: Attempt) -> Fate:
        flying.add(attempt.number)
        most.append(len(flying))
        asyncio.get_running_loop().call_later(0.099, flying.discard, attempt.number)
        return Fate(delay_s=0.1)

    stage = handoff_stage.Stage(
        decide, read_bytes=1, window_reads=3, window_bytes=2 * handoff_stage.BLOCK_BYTES
    )
    prompt = handoff_stage.ScriptedPrompt(
        [handoff_stage.computed(0, handoff_stage.THEIRS), handoff_stage.first_tokens()]
    )
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert max(most) == 2 and report.reads == 6
    handoff_stage.nothing_left(stage, prompt)


def test_two_readers_share_a_prefix_and_its_sums() -> None:
    stage = handoff_stage.Stage()
    stage.checksum_cache = ChecksumCache()
    summed: list[int] = []
    plain = stage.granter.checksums

    async def counting(blocks: Sequence[int], seeds: Sequence[int]) -> NDArray[np.uint64]:
        summed.extend(blocks)
        return await plain(blocks, seeds)

    stage.granter.checksums = counting
    prompts = [handoff_stage.chunked(), handoff_stage.chunked()]
    other = [block + 1 for block in (12, 13, 14, 15, 16, 17)]

    async def both() -> None:
        names = [handoff_stage.name_of(index) for index in range(6)]
        await asyncio.gather(
            *(
                stage.fetch(stage.granter_link(prompt), stage.opening(), own, names)
                for prompt, own in zip(prompts, (handoff_stage.OWN, other), strict=True)
            )
        )
        await stage.ended()
        await handoff_stage.play(stage, handoff_stage.chunked())

    handoff_stage.on_virtual_time(both)
    assert handoff_stage.moved(
        stage, handoff_stage.OWN, handoff_stage.THEIRS
    ) and handoff_stage.moved(stage, other, handoff_stage.THEIRS)
    assert len(summed) <= 12 and len(stage.checksum_cache) == 6  # the third handoff summed nothing
    handoff_stage.nothing_left(stage, *prompts)


def test_a_block_corrupted_once_is_read_again() -> None:
    stage = handoff_stage.Stage(
        decide=lambda attempt: Fate(corrupt=1 if attempt.number == 2 else None)
    )
    prompt = handoff_stage.chunked()
    report, _ = handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert handoff_stage.moved(stage, handoff_stage.OWN, handoff_stage.THEIRS)
    assert report.rereads == 1 and report.reads == 4
    assert report.bytes == 7 * handoff_stage.BLOCK_BYTES  # the one wrong block alone was read again
    handoff_stage.nothing_left(stage, prompt)


def test_a_block_corrupted_twice_ends_the_handoff() -> None:
    def decide(attempt: Attempt) -> Fate:
        return Fate(corrupt=attempt.remote.index(7) if 7 in attempt.remote else None)

    stage, prompt = handoff_stage.Stage(decide), handoff_stage.chunked()

    async def main() -> None:
        with pytest.raises(ChecksumMismatch, match="block 7 .* index 3"):
            await handoff_stage.play(stage, prompt)

    handoff_stage.on_virtual_time(main)
    assert stage.sent[-1] == "closed"
    handoff_stage.nothing_left(stage, prompt)


def test_without_verification_a_wrong_block_passes() -> None:
    """The one test in which a fault must not be seen: it shows that the sums see it above."""
    stage = handoff_stage.Stage(decide=lambda attempt: Fate(corrupt=0), verify=False)
    prompt = handoff_stage.chunked()
    handoff_stage.on_virtual_time(lambda: handoff_stage.play(stage, prompt))
    assert not handoff_stage.moved(stage, handoff_stage.OWN, handoff_stage.THEIRS)
    handoff_stage.nothing_left(stage, prompt)


@pytest.mark.parametrize(
    "wrong", ["identity", "stale"], ids=["another identity", "rewritten after the sums"]
)
def test_a_block_that_is_not_the_wanted_one_is_refused(wrong: str) -> None:
    def decide(attempt: Attempt) -> Fate:
        if wrong == "stale":
            late = asyncio.get_running_loop().call_later
            late(0.1, lambda: stage.granted[handoff_stage.THEIRS[2]].fill(attempt.number))
        return Fate(delay_s=0.2)

    stage, prompt = handoff_stage.Stage(decide), handoff_stage.chunked()

    async def main() -> None:
        names = [handoff_stage.name_of(index) for index in range(6)]
        if wrong == "identity":
            names[2] = b"other" * 4
        with pytest.raises(ChecksumMismatch):
            await stage.fetch(stage.granter_link(prompt), stage.opening(), handoff_stage.OWN, names)
        await stage.ended()

    handoff_stage.on_virtual_time(main)
    handoff_stage.nothing_left(stage, prompt)


@pytest.mark.parametrize("granted_s", [0.5, 1.0, 2.5])
def test_a_reader_renews_a_lease_that_is_shorter_than_its_own(granted_s: float) -> None:
    """By its own lease, it would renew for the first time after 2.5 s."""

    async def story() -> tuple[handoff_stage.Stage, handoff_stage.ScriptedPrompt]:
        stage, prompt = handoff_stage.Stage(lease_s=granted_s), handoff_stage.chunked(pause=1.5)
        link = stage.granter_link(prompt)
        stage.config = dataclasses.replace(stage.config, lease_s=10.0)
        names = [handoff_stage.name_of(index) for index in range(6)]
        await stage.fetch(link, stage.opening(), handoff_stage.OWN, names)
        await stage.ended()
        return stage, prompt

    (stage, prompt), loop = handoff_stage.on_virtual_time(story)
    assert stage.sent.count("renew") == pytest.approx(4 * loop.time() / granted_s, abs=2)
    handoff_stage.nothing_left(stage, prompt)
