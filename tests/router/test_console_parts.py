"""The parts of the console that are pure: percentiles, faults, the tree of prefixes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from baton.deploy.cli import handoff_check
from baton.proto import worker_pb2
from baton.router.console.console_app import page_files
from baton.router.console.fault_log import MAX_EVENTS, FaultLog, read_counts
from baton.router.console.latency_history import (
    FIELDS,
    MAX_POINTS,
    LatencyHistory,
    Totals,
    percentile,
    read_totals,
)
from baton.router.console.prefix_tree import prefix_tree
from baton.router.console.worker_rows import state_of
from baton.router.fleet.recent_prompts import MAX_BLOCKS, MAX_PROMPTS, RecentPrompts
from baton.runtime import metric_factory, metrics
from tests.support.json_values import JsonObject

BOUNDS = (0.1, 0.2, float("inf"))


@pytest.mark.parametrize(
    ("cumulative", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((10, 10, 10), 0.5, 0.05),
        ((0, 10, 10), 0.5, 0.15),
        ((0, 0, 10), 0.5, 0.2),  # above the last bound
        ((5, 10, 10), 0.99, 0.198),
    ],
)
def test_percentiles_lie_within_their_bucket(
    cumulative: tuple[float, ...], share: float, expected: float | None
) -> None:
    assert percentile(BOUNDS, cumulative, share) == pytest.approx(expected)


def totals(ttft: tuple[int, ...], **counts: float) -> Totals:
    return Totals(ttft, (0, 0, 0), **counts)


def test_a_point_is_of_the_last_ten_seconds() -> None:
    history = LatencyHistory(BOUNDS, BOUNDS)
    assert dict(zip(FIELDS, history.add(0, 1e9, totals((0, 0, 0))), strict=True))["ended"] == 0
    for second in range(1, 31):
        slow = second > 15
        counts = (min(second, 15), second, second) if slow else (second, second, second)
        point = history.add(second, 1e9 + second, totals(counts, ended=2 * second))
    found = dict(zip(FIELDS, point, strict=True))
    assert found["ttft_p50"] == 150 and found["itl_p50"] is None
    assert found["ended"] == 2 and found["time"] == 1e9 + 30


def test_the_history_is_bounded() -> None:
    history = LatencyHistory(BOUNDS, BOUNDS)
    for second in range(MAX_POINTS + 50):
        history.add(second, second, totals((second, second, second)))
    assert len(history.points) == MAX_POINTS and history.points[-1][0] == MAX_POINTS + 49


def test_totals_are_those_of_the_metrics() -> None:
    before = read_totals()
    metrics.TTFT.observe(0.3)
    metrics.GOODPUT_TOKENS.inc(7)
    metrics.OUTPUT_TOKENS.observe(9)
    metrics.REQUESTS.labels("failed").inc()
    after = read_totals()
    assert after.ttft[-1] - before.ttft[-1] == 1 and after.ttft[0] == before.ttft[0]
    assert after.goodput_tokens - before.goodput_tokens == 7
    assert after.output_tokens - before.output_tokens == 9
    assert after.failed - before.failed == after.ended - before.ended == 1


Row = JsonObject  # a worker as the console shows it
Rows = dict[str, Row]  # by its name


def row(state: str = "ready", boot: str = "aa", reason: str = "", fenced: int = 0) -> Row:
    blocks = {"quarantined": fenced}
    return {"role": "decode", "state": state, "boot": boot, "reason": reason, "blocks": blocks}


def seen(*steps: Rows) -> list[tuple[str, str, str]]:
    log = FaultLog()
    for rows in steps:
        events = log.observe(1.0, rows, read_counts())
    return [(event["level"], event["worker"], event["text"]) for event in events]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"d": row()}, []),
        ({}, [("notice", "d", "has left")]),
        ({"d": row("lost", reason="broke")}, [("bad", "d", "lost its link: broke")]),
        ({"d": {**row(), "role": "prefill"}}, [("notice", "d", "is a prefill worker now")]),
        ({"d": row(boot="bb")}, [("notice", "d", "was restarted (boot bb)")]),
        ({"d": row(fenced=3)}, [("bad", "d", "has 3 blocks in quarantine")]),
        ({"d": row(), "e": row()}, [("good", "e", "joined as a decode worker, ready")]),
        ({"d": row(), **{f"e{n}": row() for n in range(9)}}, [("good", "", "9 workers joined")]),
    ],
)
def test_a_change_of_a_worker_is_an_event(
    after: Rows, expected: list[tuple[str, str, str]]
) -> None:
    assert seen({}, {"d": row()}, after) == expected


def test_every_state_of_a_worker_has_its_words() -> None:
    link: Any = _Link()
    states = [state_of(link, passed_over=True)[0], state_of(link, passed_over=False)[0]]
    link.load.not_ready_reason = "memory"
    states.append(state_of(link, passed_over=False)[0])
    link.load.draining = True
    states.append(state_of(link, passed_over=False)[0])
    for name, value in (("quiet", True), ("hung", True), ("up", False), ("worker_hello", "")):
        setattr(link, name, value)
        states.append(state_of(link, passed_over=False)[0])
    link.refused_reason = "another model"
    states.append(state_of(link, passed_over=False)[0])
    assert states == [
        "circuit open", "ready", "not ready", "draining", "silent", "hung", "not linked", "lost",
        "refused",
    ]  # fmt: skip
    for state in states:
        assert seen({}, {"d": row("other")}, {"d": row(state)})


class _Link:
    """The fields of a worker's link that its state depends on."""

    def __init__(self) -> None:
        self.load = worker_pb2.Load()
        self.up, self.hung, self.quiet = True, False, False
        self.refused_reason: str | None = None
        self.worker_hello: str | None = None


def test_migrations_and_failures_are_events() -> None:
    log = FaultLog()
    log.observe(1.0, {}, read_counts())
    metrics.MIGRATIONS.labels("worker_lost").inc(3)
    metrics.REQUESTS.labels("failed").inc()
    texts = [event["text"] for event in log.observe(2.0, {}, read_counts())]
    assert texts == ["3 requests migrated (worker lost)", "1 request failed"]
    assert log.observe(3.0, {}, read_counts()) == []


def test_a_registry_outage_is_an_event() -> None:
    log = FaultLog()
    log.observe(1.0, {}, read_counts())
    metrics.REGISTRY_UP.set(0)
    try:
        (event,) = log.observe(2.0, {}, read_counts())
    finally:
        metrics.REGISTRY_UP.set(1)
    assert event["level"] == "bad" and "registry" in event["text"]


def test_the_log_of_faults_is_bounded() -> None:
    log = FaultLog()
    for number in range(MAX_EVENTS + 10):
        log.observe(number, {"d": row(boot=str(number))}, read_counts())
    assert len(log.events) == MAX_EVENTS


def chain(text: str) -> list[bytes]:
    """Identities of the blocks of a prompt: each names its whole prefix."""
    return [text[: end + 1].encode().ljust(16, b"\0") for end in range(len(text))]


def test_the_tree_has_the_shared_prefixes_and_holders() -> None:
    chains = [chain("abcd"), chain("abce"), chain("abf"), chain("z")]
    held = {b"ab": ["d0", "p0"], b"abc": ["d0"]}
    found = prefix_tree(chains, lambda identity: held.get(identity.rstrip(b"\0"), []))
    shape = [(node["depth"], node["blocks"], node["prompts"], node["holders"]) for node in found]
    assert shape[0] == (0, 2, 3, ["d0", "p0"]) and shape[1] == (1, 1, 2, ["d0"])
    assert sorted(shape[2:]) == [(0, 1, 1, []), (1, 1, 1, []), (2, 1, 1, []), (2, 1, 1, [])]


def test_the_tree_keeps_its_heaviest_nodes_and_their_parents() -> None:
    chains = [chain("ab" + last * 9) for last in "cdefgh"] + [chain("y")] * 2
    found = prefix_tree(chains, lambda identity: [], max_nodes=3)
    assert [node["depth"] for node in found] == [0, 1, 1]
    assert found[0]["prompts"] == 6 and found[1]["blocks"] == 9
    assert prefix_tree([], lambda identity: []) == []


def test_recent_prompts_are_bounded() -> None:
    recent = RecentPrompts()
    recent.add(())
    assert list(recent) == []
    for number in range(MAX_PROMPTS + 5):
        recent.add([bytes([number])] * (MAX_BLOCKS + 9))
    kept = list(recent)
    assert len(kept) == MAX_PROMPTS and {len(each) for each in kept} == {MAX_BLOCKS}
    assert kept[-1][0] == bytes([MAX_PROMPTS + 4])


def test_each_outcome_without_a_move_has_a_remedy_or_is_harmless() -> None:
    """In the page's warning, as in `baton doctor`: it shows the fault that is counted most."""
    script = page_files()["/overview.js"].body.decode()
    (remedies,) = re.findall(r"^const REMEDIES = \{\n(.*?)^\};$", script, re.DOTALL | re.MULTILINE)
    named = re.findall(r'^  (\w+): "[^"]+",$', remedies, re.MULTILINE)
    (harmless,) = re.findall(r"^const HARMLESS = \[(.*)\];$", script, re.MULTILINE)
    assert sorted(re.findall(r'"(\w+)"', harmless)) == sorted(handoff_check.HARMLESS)
    named += handoff_check.HARMLESS
    assert sorted(["moved", *named]) == sorted(metric_factory.PREFILL_OUTCOMES)
