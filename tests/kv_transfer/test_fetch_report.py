"""The times of offers: heard once, landed with the last READ, verified with the last block."""

from __future__ import annotations

import pytest

from baton.kv_transfer import fetch_report
from baton.kv_transfer.fetch_report import FetchReport, OfferTimes


def test_an_offer_is_verified_with_its_last_block() -> None:
    report = FetchReport()
    report.record_offer(range(3, 7), 1.0)
    report.record_verified([3, 4, 5], 2.0)
    assert report.offers[0].verified == 0.0
    report.record_verified([6], 3.0)
    assert (report.offers[0].received, report.offers[0].verified) == (1.0, 3.0)


def test_blocks_are_distinguished_by_their_offer() -> None:
    report = FetchReport()
    report.record_offer(range(16, 32), 5.0)
    report.record_offer(range(16), 6.0)
    report.record_landed([15, 16], 7.0)  # one READ over two offers
    report.record_landed([17], 8.0)
    report.record_verified(range(16, 32), 9.0)
    first, second = report.offers
    assert (first.first, first.blocks, first.received) == (0, 16, 6.0)
    assert (first.landed, first.verified) == (7.0, 0.0)
    assert (second.landed, second.verified) == (8.0, 9.0)


def test_a_read_counts_for_each_offer_that_it_takes() -> None:
    """The second READ takes the end of one offer and the begin of the next; a block comes again."""
    report = FetchReport()
    report.record_offer(range(4), 1.0)
    report.record_offer(range(4, 6), 2.0)
    for indices in ([0, 1, 2], [3, 4], [5], [0]):
        report.record_read(indices, 10)
    assert (report.reads, report.bytes) == (4, 70)
    assert [(offer.reads, offer.bytes) for offer in report.offers] == [(3, 50), (2, 20)]


def test_offers_are_looked_up_once_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each block, since the decode worker's loop does it."""
    report, lookups = FetchReport(), []
    report.record_offer(range(4096), 1.0)
    report.record_offer(range(4096, 8192), 1.0)
    find = fetch_report.bisect_right
    monkeypatch.setattr(
        fetch_report, "bisect_right", lambda *at, **how: lookups.append(at) or find(*at, **how)
    )
    for record in (
        lambda indices: report.record_read(indices, 10),
        lambda indices: report.record_landed(indices, 2.0),
        lambda indices: report.record_verified(indices, 3.0),
    ):
        lookups.clear()
        record([*range(8000), *range(8000, 8192)])
        assert len(lookups) == 2
    assert [(offer.bytes, offer.reads) for offer in report.offers] == [(40960, 1)] * 2
    assert [(offer.landed, offer.verified) for offer in report.offers] == [(2.0, 3.0)] * 2


def test_an_offer_counts_once_for_a_read_in_any_order() -> None:
    report = FetchReport()
    report.record_offer(range(2), 1.0)
    report.record_offer(range(2, 4), 1.0)
    report.record_read([3, 0, 2, 1], 10)
    assert [(offer.bytes, offer.reads) for offer in report.offers] == [(20, 1)] * 2
    report.record_verified([3, 0, 2], 2.0)
    assert [offer.verified for offer in report.offers] == [0.0, 2.0]


def test_an_offer_is_hidden_until_the_first_tokens() -> None:
    offer = FetchReport(offers=[OfferTimes(0, 1, 1.0, verified=3.0)]).offers[0]
    assert [offer.hidden_s(first) for first in (0.5, 1.5, 9.0)] == [0.0, 0.5, 2.0]


def test_a_fetch_lasts_from_its_start_until_all_is_verified() -> None:
    assert FetchReport(started=2.0, verified=2.5).seconds == 0.5


def test_time_of_reads_counts_overlaps_once_and_no_pause() -> None:
    report = FetchReport()
    for first, received, landed in ((0, 1.0, 2.0), (2, 1.5, 2.5), (4, 4.0, 4.25)):
        report.record_offer(range(first, first + 2), received)
        report.record_landed([first, first + 1], landed)
    assert report.read_s == 1.75
    assert FetchReport().read_s == 0.0
