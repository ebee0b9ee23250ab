"""`baton bench` against a server whose timing and faults are known."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.deploy.bench import bench_run
from baton.deploy.bench.traffic_options import UNMET_EXIT
from baton.deploy.cli import main
from baton.deploy.host.process_lifecycle import INTERRUPTED_EXIT
from baton.deploy.host.restarts import CONFIG_EXIT
from tests.support.json_values import JsonObject
from tests.support.machine_speed import slowness
from tests.support.openai_stub import OpenAiStub, Received, Script, openai_stub
from tests.support.waiting import wait_until

SLACK_S = 0.25 * slowness()  # of a machine that is busy with other tests
ATTACHED = """\
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run detached
from baton.deploy.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., JsonObject]:
    """`report(stub, *flags, code=0)`: the JSON report of one run."""

    def run(stub: OpenAiStub, *flags: str, code: int = 0) -> JsonObject:
        file = tmp_path / "report.json"
        words = ["bench", "--url", stub.url, "--json", str(file), *flags]
        assert main.main(words) == code
        found: JsonObject = json.loads(file.read_text())
        return found

    return run


def stub_ttft_s(received: Received) -> float:
    return received.written_s[0] - received.at_s


def test_times_are_those_of_the_server(report: Callable[..., JsonObject]) -> None:
    """The server notes when it wrote each chunk: the client may add its own reaction alone."""
    slow = slowness()
    with openai_stub(lambda number, body: Script(0.2 * slow, 0.05 * slow)) as stub:
        found = report(stub, "--concurrency", "2", "--limit", "8", "--output", "constant:10")
    ttfts = sorted(stub_ttft_s(each) for each in stub.received)
    gaps = sorted(
        after - before
        for each in stub.received
        for before, after in zip(each.written_s, each.written_s[1:], strict=False)
    )
    assert (found["finished"], len(gaps)) == (8, 72)
    assert ttfts[0] >= 0.2 * slow
    assert found["ttft_s"]["p50"] == pytest.approx(ttfts[3], abs=0.03 * slow)
    assert found["itl_s"]["mean"] == pytest.approx(sum(gaps) / 72, rel=0.02)
    assert found["itl_s"]["p50"] == pytest.approx(gaps[35], abs=0.005 * slow)
    assert found["tpot_s"]["mean"] == pytest.approx(found["itl_s"]["mean"], rel=1e-6)
    assert found["e2e_s"]["p50"] == pytest.approx((0.2 + 9 * 0.05) * slow, abs=SLACK_S)
    assert (found["output_tokens"], found["tokens_from"]) == (80, "usage")


def test_prompts_have_the_length_that_was_asked_for(report: Callable[..., JsonObject]) -> None:
    with openai_stub() as stub:
        found = report(stub, "--concurrency", "2", "--limit", "6", "--prompt", "constant:301")
        assert (found["prompt_tokens"], found["wanted_prompt_tokens"]) == (6 * 301, 6 * 301)
        assert stub.probes == 2
        prompts = [each.body["messages"][0]["content"] for each in stub.received]
        assert len(set(prompts)) == 6
        found = report(
            stub, "--rate", "50", "--limit", "5", "--token-ids", "5-900", "--prompt", "constant:77"
        )
        ids = [each.body["prompt"] for each in stub.received[6:]]
        assert [len(each) for each in ids] == [77] * 5 and stub.probes == 2
        assert all(5 <= each <= 900 for prompt in ids for each in prompt)
    assert {each.path for each in stub.received[6:]} == {"/v1/completions"}
    assert all(each.body["ignore_eos"] is True for each in stub.received)


def test_a_trace_is_replayed_with_its_shared_prefixes(
    report: Callable[..., JsonObject], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 300 * n, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 10 + n]}
        for n in range(4)
    ]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    with openai_stub() as stub:
        found = report(
            stub, "--trace", str(trace), "--speed", "2", "--scale", "0.5", "--warmup", "1"
        )
    begin_s = stub.received[0].at_s
    arrivals = [each.at_s - begin_s for each in stub.received]
    assert arrivals == pytest.approx([0.0, 0.15, 0.3, 0.45], abs=SLACK_S)
    prompts = [each.body["messages"][0]["content"].split() for each in stub.received]
    assert len({tuple(each[:256]) for each in prompts}) == 1
    assert len({tuple(each) for each in prompts}) == 4
    assert (found["requests"], found["wanted_prompt_tokens"]) == (3, 3 * 550)
    assert found["prompt_tokens"] == pytest.approx(3 * 550, rel=0.01)
    assert found["output_tokens"] == 3 * 2


def test_a_stalled_server_shows_in_the_tail(report: Callable[..., JsonObject]) -> None:
    """It answers at once, and stands still from 0.5 s to 1.5 s after its first request: about a
    third of three seconds' requests wait, on average half a second. A slow processor has more time
    for all of it."""
    slow = slowness()

    def script(number: int, body: JsonObject) -> Script:
        since_s = time.monotonic() - (stub.received[0].at_s if number else time.monotonic())
        return Script(1.5 * slow - since_s if 0.5 * slow <= since_s < 1.5 * slow else 0.0)

    with openai_stub(script) as stub:
        flags = [
            "--rate",
            f"{60 / slow}",
            "--duration",
            f"{3 * slow}",
            "--output",
            "constant:2",
            "--tokens-per-word",
            "2",
        ]
        found = report(stub, *flags)
    assert found["errors"] == {}
    assert found["requests"] == len(stub.received) > 120
    late = sum(stub_ttft_s(each) > 0.1 * slow for each in stub.received) / len(stub.received)
    assert late > 0.15
    assert found["ttft_s"]["max"] > 0.9 * slow and found["ttft_s"]["p90"] > 0.3 * slow
    assert found["ttft_s"]["p50"] < 0.3 * slow


def test_the_generators_own_delay_is_counted_and_reported(
    report: Callable[..., JsonObject],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The generator itself stands still for half a second: what should have been sent then has the
    delay in its TTFT, although the server answered at once."""
    body_of = bench_run.RequestForm.body
    calls = []

    def slow_body(form: bench_run.RequestForm, prompt: str, output_tokens: int) -> bytes:
        calls.append(prompt)
        if len(calls) == 20:
            time.sleep(0.5)  # the delay that the report has to show
        return body_of(form, prompt, output_tokens)

    monkeypatch.setattr(bench_run.RequestForm, "body", slow_body)
    with openai_stub() as stub:
        flags = [
            "--rate",
            "50",
            "--limit",
            "100",
            "--output",
            "constant:2",
            "--tokens-per-word",
            "2",
        ]
        found = report(stub, *flags)
    assert found["send_lag_s"]["max"] >= 0.5 and found["send_lag_s"]["p90"] > 0.05
    assert found["ttft_s"]["max"] >= 0.5
    assert "requests were sent late" in capsys.readouterr().out


def test_faults_are_counted_by_kind(
    report: Callable[..., JsonObject], capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = [
        Script(break_after=2),
        Script(status=429, plain=b'{"error":{"message":"slow down"}}', headers=("Retry-After: 0",)),
        Script(status=500, plain=b"<h1>oops</h1>"),
        Script(event='{"error": {"message": "worker lost"}}'),
        Script(event="{"),
        Script(ttft_s=600.0),
        Script(),
        Script(usage=False),
    ]
    with openai_stub(lambda number, body: scripts[number % 8]) as stub:
        flags = [
            "--concurrency",
            "1",
            "--limit",
            "16",
            "--output",
            "constant:4",
            "--timeout",
            f"{0.6 * slowness()}",
        ]
        found = report(stub, *flags, "--slo", "ttft=5s,itl=5s")
    assert (found["requests"], found["finished"]) == (16, 4)
    assert found["errors"] == {
        "broken": 2, "http 429": 2, "http 500": 2, "error event": 2, "malformed": 2, "timeout": 2,
    }  # fmt: skip
    assert found["retry_after"] == 2
    assert found["good_share"] == 0.25
    assert (found["output_tokens"], found["tokens_from"]) == (16, "chunks")
    shown = capsys.readouterr().out
    assert "2 http 429: slow down" in shown and "2 error event: worker lost" in shown


def test_answers_without_streaming_have_no_first_token(
    report: Callable[..., JsonObject],
) -> None:
    """Its whole time counts as its TTFT, and no objective of gaps applies."""
    with openai_stub(lambda number, body: Script(0.1)) as stub:
        flags = ["--concurrency", "2", "--limit", "4", "--no-stream", "--openai-only"]
        slow = report(stub, *flags, "--slo", "ttft=10s,itl=1s", "--tokens-per-word", "2")
        found = report(stub, *flags, "--slo", "ttft=90ms", "--tokens-per-word", "2")
    assert (slow["good_share"], slow["finished"]) == (1.0, 4)
    assert (found["ttft_s"], found["itl_s"], found["finished"]) == (None, None, 4)
    assert found["e2e_s"]["p50"] >= 0.1 and found["good_share"] == 0.0
    assert all("ignore_eos" not in each.body for each in stub.received)


def test_a_goodput_below_the_wanted_one_has_its_exit_code(
    report: Callable[..., JsonObject], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--concurrency", "1", "--limit", "4", "--output", "constant:2"]
    flags += ["--slo", f"ttft={round(100 * slowness())}ms"]
    with openai_stub(lambda number, body: Script(0.3 * slowness() * (number % 2))) as stub:
        found = report(stub, *flags, "--fail-under-goodput", "0.9", code=UNMET_EXIT)
        assert found["good_share"] == 0.5
        assert "goodput 50.0% is below 90.0% of the requests" in capsys.readouterr().err
        report(stub, *flags, "--fail-under-goodput", "0.5")


def test_no_finished_request_is_a_failure(
    report: Callable[..., JsonObject], capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_stub(lambda number, body: Script(status=503, plain=b"full")) as stub:
        found = report(stub, "--concurrency", "1", "--limit", "2", code=1)
    assert found["errors"] == {"http 503": 2}
    shown = capsys.readouterr()
    assert "2 http 503: full" in shown.out and "no request finished" in shown.err


def test_a_run_of_warm_up_requests_alone_is_a_failure(
    report: Callable[..., JsonObject], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the trace's ten requests the duration leaves two, and both are part of the warm-up."""
    trace = tmp_path / "trace.jsonl"
    times_s = [0.0, 0.01, *(60.0 + n for n in range(8))]
    rows = [{"arrived_s": at_s, "prompt_tokens": 9, "output_tokens": 2} for at_s in times_s]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    flags = ["--trace", str(trace), "--duration", "1", "--warmup", "5", "--tokens-per-word", "2"]
    with openai_stub() as stub:
        found = report(stub, *flags, code=1)
    assert (len(stub.received), found["requests"]) == (2, 0)
    assert "within the first 5 requests" in capsys.readouterr().err


def test_the_key_comes_from_the_environment_or_a_file(
    report: Callable[..., JsonObject], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("BATON_API_KEY", "from-environment")
    flags = ["--concurrency", "1", "--limit", "1"]
    with openai_stub() as stub:
        report(stub, *flags)
        report(stub, *flags, "--api-key-file", str(tmp_path / "key"))
    keys = [each.headers["authorization"] for each in stub.received]
    assert keys == ["Bearer from-environment", "Bearer from-file"]


def test_interrupt_gives_the_figures_so_far(tmp_path: Path) -> None:
    """On a terminal, the table begins on a line of its own below the bar."""
    file, (terminal, stderr) = tmp_path / "report.json", pty.openpty()
    with openai_stub(lambda number, body: Script(0.05 if number < 3 else 60.0)) as stub:
        command = [sys.executable, "-P", "-c", ATTACHED, "bench", "--url", stub.url]
        command += ["--concurrency", "1", "--limit", "9", "--json", str(file)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        wait_until(lambda: len(stub.received) == 4)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30 * slowness())
    drawn = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    os.close(stderr)
    assert process.returncode == INTERRUPTED_EXIT
    assert "\rbench [" in drawn and drawn.endswith("/9\r\n")
    assert "3 of 3 finished, 1 unfinished" in out and "interrupted" in out
    assert json.loads(file.read_text())["finished"] == 3


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--concurrency", "1"], CONFIG_EXIT, "nothing ends the load: give --limit or --duration"),
        (["--limit", "5"], CONFIG_EXIT, "nothing says when to send: give --rate"),
        (["--rate", "1", "--limit", "2", "--warmup", "2"], CONFIG_EXIT, "--warmup 2 leaves none"),
        (["--rate", "1", "--limit", "2", "--slo", "ttft=3"], CONFIG_EXIT, "--slo 'ttft=3'"),
        (["--rate", "1", "--limit", "2", "--prompt", "big"], CONFIG_EXIT, "prompt is 'big'"),
        (["--trace", "/no/trace"], CONFIG_EXIT, "/no/trace cannot be read"),
        (["--rate", "1", "--limit", "2", "--api-key-file", "/no/key"], CONFIG_EXIT, "/no/key"),
        (["--rate", "1", "--limit", "2", "--model", "m"], 1, "the server cannot be reached"),
        (
            ["--rate", "9", "--limit", "2", "--model", "m", "--token-ids", "1-9"],
            1, "the server cannot be reached",
        ),
        (["--rate", "1", "--limit", "2"], 1, "nothing answers at http://127.0.0.1:9"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_clear_line(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "--url", "http://127.0.0.1:9", *flags]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("baton: error: ") and words in line


@pytest.mark.parametrize(
    "flags",
    [
        ["--rate", "0"],
        ["--rate", "1", "--concurrency", "1"],
        ["--trace", "a", "--traffic", "b"],
        ["--token-ids", "9-3"],
        ["--fail-under-goodput", "1.2"],
    ],
)
def test_flags_out_of_range_are_refused_before_any_call(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["bench", "--url", "http://127.0.0.1:9", *flags])
    assert ended.value.code == 2


def test_the_bar_counts_requests_on_a_terminal(
    report: Callable[..., JsonObject],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with openai_stub() as stub:
        report(stub, "--concurrency", "1", "--limit", "3")
        assert capsys.readouterr().err == ""
        monkeypatch.setattr("sys.stderr.isatty", lambda: True)
        report(stub, "--concurrency", "1", "--limit", "3")
    drawn = capsys.readouterr().err
    assert drawn.endswith("] 3/3\n") and "bench [" in drawn
