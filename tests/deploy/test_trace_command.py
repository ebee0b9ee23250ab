"""What `baton trace` draws: each phase with its bar, no line wider than the terminal, hidden time
apart; and whose command line is refused."""

from __future__ import annotations

import json
import time

import pytest

from baton.deploy.cli import trace
from baton.deploy.cli.chat import ChatClient
from baton.deploy.cli.main import main
from baton.deploy.cli.trace import NARROWEST, listing, waterfall
from tests.support.json_values import JsonObject

FOUND: JsonObject = {
    "id": "req-1", "trace_id": "", "time": 1.8e9, "ttft_s": 0.1, "total_s": 0.2,
    "outcome": "finished", "kept": ["slow"], "prompt_tokens": 300, "output_tokens": 4,
    "cached_tokens": 0, "migrations": 0, "preempted": False, "decode_worker": "decode-0",
    "path": [
        ["receive", 1_000, 0, ""], ["credit wait", 9_000, 0, "decode-0"],
        ["chunk", 40_000, 150, "prefill-0"], ["chunk", 40_000, 150, "prefill-0"],
        ["write", 10_000, 0, ""],
    ],
    "after_us": 95_000,
    "after": [["fetch", 20_000, 9, "decode-0"], ["step", 85_000, 0, "decode-0"]],
    "offers": [[50_000, 60_000, 70_000, 9]], "read_bytes": 4_000_000, "reads": 2,
    "hidden_us": [20_000], "transport": "shared memory",
}  # fmt: skip


def test_each_phase_has_a_bar_where_it_was() -> None:
    lines = waterfall(FOUND, 100)
    room = 100 - trace.NAME_WIDTH - 14
    chunks = [line for line in lines if "chunk (150 tokens)" in line]
    assert len(chunks) == 2
    ends = [len(line) - (trace.NAME_WIDTH + 12) for line in chunks]
    assert ends == [pytest.approx(50 / 200 * room, abs=1), pytest.approx(90 / 200 * room, abs=1)]
    (hidden,) = [line for line in lines if "9 blocks fetched" in line]
    assert "." * 3 in hidden and "#" not in hidden
    assert any("4.0 MB, 2 READs, 0.40 GB/s over shared memory (" in line for line in lines)
    older = {name: FOUND[name] for name in FOUND if name not in ("transport", "hidden_us")}
    assert any("2 READs, 0.40 GB/s (" in line for line in waterfall(older, 100))
    assert [line for line in waterfall(older, 100) if line.startswith("  9 blocks")] == [hidden]


def test_what_came_after_the_first_token_is_not_hidden() -> None:
    """The first offer is hidden, the second in part, the third not: it is in `fetch`."""
    offers = [[50_000, 60_000, 70_000, 9], [80_000, 105_000, 115_000, 8], [96_000, 110_000, 0, 7]]
    for found in ({"hidden_us": [20_000, 15_000, 0]}, {"hidden_us": None}):
        lines = waterfall({**FOUND, "offers": offers, **found}, 100)
        hidden = [line for line in lines if "blocks fetched" in line]
        assert [line.split("  ")[1] for line in hidden] == [
            "9 blocks fetched",
            "8 blocks fetched in part",
        ]
        room = 100 - trace.NAME_WIDTH - 14
        first_token = trace.NAME_WIDTH + 12 + 95 / 200 * room
        assert len(hidden[1]) == pytest.approx(first_token, abs=1)
        assert "15.0" in hidden[1]


def test_the_speed_counts_overlapping_reads_once() -> None:
    offers = [[0, 1000, 1100, 1], [500, 1500, 1600, 1], [4000, 4500, 4600, 1]]
    lines = waterfall({**FOUND, "offers": offers, "hidden_us": [0, 0, 0]}, 100)
    assert any("2.00 GB/s" in line for line in lines)  # 4 MB in 2 ms


@pytest.mark.parametrize("width", [NARROWEST, 80, 133])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = {**FOUND, "path": [["credit wait", 5, 0, "a-worker-with-a-very-long-name" * 3]] * 9}
    for found in (FOUND, long, {**FOUND, "path": [], "after": [], "offers": [], "hidden_us": []}):
        assert max(map(len, waterfall(found, width))) <= width


def test_the_slowest_name_their_largest_phases() -> None:
    (_, line) = listing([FOUND])
    assert "chunk (prefill-0) 80%" in line and "[slow]" in line and "100.0 ms" in line
    assert time.strftime("%m-%d %H:%M:%S", time.localtime(1.8e9)) in line
    assert listing([]) == ["this router has answered no request of this key"]


def test_a_request_without_an_answer_has_no_first_byte() -> None:
    without = {**FOUND, "ttft_s": None}
    (_, line) = listing([without])
    assert "none" in line and "chunk (prefill-0) 80%" in line
    (path,) = [line for line in waterfall(without, 100) if "critical path" in line]
    assert path.endswith("100.0 ms")


@pytest.mark.parametrize(
    "arguments", [["trace"], ["trace", "req-1", "--slow"], ["trace", "--slow", "--latest"]]
)
def test_one_of_id_and_slow_is_needed(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_the_command_asks_the_routers_routes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def answer(_: ChatClient, path: str, needed: str) -> JsonObject:
        asked.append(path)
        return FOUND if needed == "path" else {"traces": [FOUND]}

    monkeypatch.setattr(ChatClient, "trace", answer)
    url = ["--url", "http://127.0.0.1:1"]
    assert main(["trace", "a/b?c", "--json", *url]) == 0
    assert json.loads(capsys.readouterr().out) == FOUND
    assert main(["trace", "--slow", "--count", "3", *url]) == 0
    assert "req-1" in capsys.readouterr().out
    assert main(["trace", "--latest", *url]) == 0
    assert asked == ["/trace/a%2Fb%3Fc", "/traces?slow=3", "/traces?latest=20"]
