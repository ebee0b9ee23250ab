"""Traffic: the formats, the bounds, and what wrong lines are answered with."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from baton.planner import traces
from baton.planner.trace_distributions import draw_trace
from baton.planner.traces import TraceRequest, at_rate, read_trace, write_traffic
from baton.runtime.errors import ConfigError
from tests.support.shared_traces import shared_trace

LINE = '{"timestamp": 2500, "input_length": 600, "output_length": 3, "hash_ids": [4, 9]}\n'


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_mooncake_lines_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    early = '{"timestamp": 500, "input_length": 512, "output_length": 7, "hash_ids": [4]}\n'
    assert read_trace(written(tmp_path / "t", LINE + "\n" + early)) == [
        TraceRequest(0.0, 512, 7, (4,)),
        TraceRequest(2.0, 600, 3, (4, 9)),
    ]


def test_azure_rows_have_times_and_no_blocks(tmp_path: Path) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    rows += "2023-11-16 18:17:04.4799600,110,27\n"
    first, second = read_trace(written(tmp_path / "t", rows))
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.arrived_s == pytest.approx(0.5)


def test_written_traffic_is_read_as_it_was(tmp_path: Path) -> None:
    requests = [TraceRequest(0.0, 600, 3, (4, 9)), TraceRequest(0.25, 10, 1)]
    write_traffic(requests, tmp_path / "t")
    assert read_trace(tmp_path / "t") == requests


def test_recorded_traffic_needs_no_blocks(tmp_path: Path) -> None:
    text = '{"arrived_s": 1.5, "prompt_tokens": 3, "output_tokens": 4}'
    assert read_trace(written(tmp_path / "t", text)) == [TraceRequest(0.0, 3, 4)]


def test_limit_and_rate(tmp_path: Path) -> None:
    trace = written(tmp_path / "t", LINE.replace("2500", "0") + LINE + LINE)
    assert [each.arrived_s for each in at_rate(read_trace(trace, limit=2), 2.0)] == [0.0, 1.25]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("7", "is not a JSON object"),
        (LINE.replace("2500", "-1"), "timestamp is -1"),
        (LINE.replace("2500", "NaN"), "timestamp is nan"),
        (LINE.replace("2500", "1e300"), "timestamp is 1e"),
        (LINE.replace("2500", "9" * 400), "timestamp is 9{40}, below 0 or more than a year"),
        (LINE.replace("2500", "1e999"), "timestamp is inf"),
        (LINE.replace("600", "0"), "input_length is 0"),
        (LINE.replace("600", "true"), "input_length is True"),
        (LINE.replace("600", "600.5"), "input_length is 600.5, not a whole number"),
        (LINE.replace("600", "99999999999"), "input_length is 99999999999"),
        (LINE.replace(' "output_length": 3,', ""), "output_length is missing"),
        (LINE.replace("[4, 9]", "[4, 9, 11]"), "hash_ids has 3 entries, and 600 tokens have 1"),
        (LINE.replace("[4, 9]", '[4, "9"]'), r"hash_ids\[1\] is '9'"),
        (LINE.replace("[4, 9]", "7"), "hash_ids is not a list"),
        (LINE.replace("hash_ids", "hashes"), "unknown field 'hashes'"),
    ],
)
def test_wrong_line_names_line_and_field(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"t:2.*{message}"):
        read_trace(written(tmp_path / "t", LINE + line))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,2", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:17:03,1", "has 2 columns, not 3"),
        ("2023-11-16 18:17:03,-1,2", "ContextTokens is '-1'"),
        ("2023-11-16 18:17:03,1,0", "GeneratedTokens is 0"),
        ("2023-11-16 18:17:03,1,\u0663", "GeneratedTokens is"),
    ],
)
def test_wrong_row_names_line_and_column(tmp_path: Path, row: str, message: str) -> None:
    text = f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n"
    with pytest.raises(ConfigError, match=f"t:2.*{message}"):
        read_trace(written(tmp_path / "t", text))


def test_files_that_are_no_traces_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text, message in (
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("hello\n", "neither a JSON object"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request after its header"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_trace(written(tmp_path / "t", text))
    (tmp_path / "t").write_bytes(b'{"\xff')
    for path in (tmp_path / "t", tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=str(path)):
            read_trace(path)
    monkeypatch.setattr(traces, "MAX_LINE_CHARACTERS", 100)
    with pytest.raises(ConfigError, match="t:1 has more than 100 characters"):
        read_trace(written(tmp_path / "t", "{" + " " * 100))
    asked: list[int] = []

    class Endless(io.StringIO):
        """A file that is one line."""

        def readline(self, size: int | None = -1, /) -> str:
            assert size is not None and 0 <= size < 1000
            asked.append(size)
            return "{" * size

    monkeypatch.setattr(Path, "open", lambda *_, **__: Endless())
    with pytest.raises(ConfigError, match="t:1 has more than 100 characters"):
        read_trace(tmp_path / "t")
    assert asked == [101]
    monkeypatch.undo()
    monkeypatch.setattr(traces, "MAX_REQUESTS", 2)
    with pytest.raises(ConfigError, match="more than 2 lines"):
        read_trace(written(tmp_path / "t", LINE * 4))


def test_distributions_draw_the_same_requests_again() -> None:
    text = "requests=2000,rate=4,prompt=lognormal:2000:0.8,output=exponential:300,seed=7"
    drawn = draw_trace(text)
    assert drawn == draw_trace(text) and drawn != draw_trace(text.replace("seed=7", "seed=8"))
    assert drawn[-1].arrived_s == pytest.approx(500, rel=0.1)
    assert sum(each.output_tokens for each in drawn) / 2000 == pytest.approx(300, rel=0.1)
    assert sorted(each.prompt_tokens for each in drawn)[1000] == pytest.approx(2000, rel=0.1)
    assert {
        each.prompt_tokens
        for each in draw_trace("requests=9,rate=1,prompt=constant:5,output=uniform:1:3")
    } == {5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "in the distributions"),
        ("requests=1", "lack rate, prompt, output"),
        ("requests=1,rate=0,prompt=constant:1,output=constant:1", "rate is 0"),
        ("requests=1e9,rate=1,prompt=constant:1,output=constant:1", "requests is 1e9"),
        ("requests=1,rate=1,prompt=normal:1,output=constant:1", "prompt is 'normal:1'"),
        ("requests=1,rate=1,prompt=constant,output=constant:1", "constant takes 1 numbers"),
        ("requests=1,rate=1,prompt=constant:x,output=constant:1", "prompt is 'x', not a number"),
        ("requests=1,rate=1,prompt=constant:nan,output=constant:1", "prompt is nan"),
        ("requests=1,rate=1,speed=1", "'speed=1'"),
        ("requests=1,rate=1,prompt=lognormal:9:500,output=constant:1", "prompt is 500, not from"),
    ],
)
def test_wrong_distributions_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draw_trace(text)


def test_the_widest_distribution_can_be_drawn_from() -> None:
    drawn = draw_trace("requests=5000,rate=1,prompt=lognormal:16777216:20,output=exponential:16e6")
    assert {each.prompt_tokens for each in drawn} >= {1, traces.MAX_TOKENS}


def test_the_conversation_trace_is_read() -> None:
    found = read_trace(shared_trace("mooncake/conversation_trace.jsonl"))
    assert len(found) == 12_031
    assert found[-1].arrived_s == pytest.approx(3537, abs=1)


def test_the_azure_trace_is_read() -> None:
    assert len(read_trace(shared_trace("azure/AzureLLMInferenceTrace_code.csv"))) == 8_819
