"""`baton bench`: load for any server of the OpenAI API, and what its clients saw."""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.deploy.bench.traffic_options import (
    MAX_REQUESTS,
    UNMET_EXIT,
    add_reporting,
    add_source,
    positive,
    progress_bar,
    read_objectives,
    read_source,
    share,
    write_json,
)
from baton.deploy.cli.arguments import add_command
from baton.deploy.serve.flag_values import seconds, whole
from baton.runtime.errors import BatonError, ConfigError

if TYPE_CHECKING:
    from baton.deploy.bench.bench_report import BenchReport
    from baton.deploy.bench.bench_run import BenchPlan
    from baton.deploy.bench.load import Load
    from baton.planner.traces import TraceRequest

MAX_DURATION_S = 7 * 86_400.0
MAX_TOKEN_ID = (1 << 31) - 1
REPEATED_LENGTHS = 4096  # drawn for a closed loop that its duration ends
SPARE_DEVIATIONS = 6  # of a Poisson count: enough requests for the whole duration


def add_bench(commands: Any) -> None:
    text = "load for any server of the OpenAI API: TTFT, ITL, goodput; BATON_API_KEY is its key"
    command = add_command(commands, "bench", text, _bench)
    command.add_argument(
        "--url", help="root of the server (default: the instance that runs on this host)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="the model (default: the first that the server lists)"
    )
    command.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="its first line is the API key"
    )
    add_source(command, required=False)
    _add_arrivals(command)
    _add_requests(command)
    add_reporting(command)
    command.add_argument(
        "--fail-under-goodput", type=share, metavar="X",
        help=f"exit code {UNMET_EXIT} if a smaller share of the requests meets the objectives",
    )  # fmt: skip


def _add_arrivals(command: argparse.ArgumentParser) -> None:
    arrivals = command.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--rate", type=positive, metavar="R",
        help="open loop: R requests a second, as a Poisson process (default: the times of "
        "--trace or --traffic)",
    )  # fmt: skip
    arrivals.add_argument(
        "--concurrency", type=whole(1, 100_000), metavar="N",
        help="closed loop: N clients, each with one request at a time",
    )  # fmt: skip
    command.add_argument(
        "--duration", type=seconds(MAX_DURATION_S), metavar="S",
        help="send nothing later than S seconds after the start; wait for what was sent",
    )  # fmt: skip
    command.add_argument(
        "--warmup", type=whole(0, MAX_REQUESTS), default=0, metavar="N",
        help="leave the first N requests out of all figures (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--timeout", type=seconds(MAX_DURATION_S), default=600.0, metavar="S",
        help="end a request after S seconds, as an error (default: %(default)s)",
    )  # fmt: skip


def _add_requests(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prompt", default="constant:512", metavar="LENGTHS",
        help="without --trace and --traffic: tokens of a prompt, as in lognormal:2000:0.8 "
        "(default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--output", default="constant:128", metavar="LENGTHS",
        help="the same: tokens of an output (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--scale", type=positive, default=1.0, metavar="X",
        help="make prompts, outputs and shared prefixes X times as long (default: 1)",
    )  # fmt: skip
    command.add_argument(
        "--seed", type=whole(0, 1 << 53), default=0, metavar="S",
        help="another seed: other prompts without hashes, other arrivals (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--endpoint", choices=("chat", "completions"), default="chat",
        help="where requests go (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--token-ids", type=_id_range, metavar="LOW-HIGH",
        help="prompts of token ids from this range, of exact length, sent as completions",
    )  # fmt: skip
    command.add_argument(
        "--tokens-per-word", type=positive, metavar="X",
        help="tokens of a word of the prompts (default: measured by two requests)",
    )  # fmt: skip
    command.add_argument(
        "--no-stream", action="store_true", help="ask for whole answers: no TTFT and no ITL"
    )
    command.add_argument(
        "--openai-only", action="store_true",
        help="send no ignore_eos, which not every server takes: outputs may end early",
    )  # fmt: skip


def _bench(options: argparse.Namespace) -> int:
    from baton.deploy.bench.bench_report import bench_table, make_report
    from baton.deploy.bench.bench_run import run_bench
    from baton.deploy.cli.chat_session import running_url
    from baton.deploy.host.process_lifecycle import INTERRUPTED_EXIT, raise_open_file_limit
    from baton.deploy.plots.figure import require_matplotlib

    objectives = read_objectives(options.slo)
    if options.plot is not None:
        require_matplotlib()
    url = options.url or running_url(_api_key(options.api_key_file))
    raise_open_file_limit()  # the open loop has a connection for each request under way
    plan = _plan(options, url)
    result = run_bench(plan, progress_bar("bench"))
    if result.interrupted and sys.stderr.isatty():
        print(file=sys.stderr)  # after the bar
    report = make_report(
        result, objectives, server=url, model=plan.form.model, load=_load_text(options, plan.load)
    )
    print(bench_table(report))
    if options.json is not None:
        write_json(options.json, report.to_json())
    if options.plot is not None:
        from baton.deploy.plots.bench_plot import plot_bench

        plot_bench(options.plot, result, report, objectives)
    if report.interrupted:
        return INTERRUPTED_EXIT
    return _exit_code(report, options)


def _exit_code(report: BenchReport, options: argparse.Namespace) -> int:
    if not report.requests:
        raise BatonError(
            f"no request was measured: the load ended within the first {options.warmup} requests, "
            "which are left out; reduce --warmup or give more requests or a longer --duration"
        )
    if not report.finished:
        raise BatonError("no request finished: the errors above say why")
    wanted_share: float | None = options.fail_under_goodput
    if wanted_share is None or report.good_share >= wanted_share:
        return 0
    print(
        f"goodput {report.good_share:.1%} is below {wanted_share:.1%} of the requests",
        file=sys.stderr,
    )
    return UNMET_EXIT


def _plan(options: argparse.Namespace, url: str) -> BenchPlan:
    from baton.deploy.bench.bench_run import BenchPlan, RequestForm
    from baton.deploy.bench.http_client import ServerAddress

    api_key = _api_key(options.api_key_file)
    address = ServerAddress.parse(url, api_key)
    load = _load(options)
    if options.warmup >= len(load.requests) and not load.repeat:
        raise ConfigError(
            f"--warmup {options.warmup} leaves none of {len(load.requests)} requests to measure"
        )
    form = RequestForm(
        model=options.model or _first_model(url, api_key),
        chat=options.endpoint == "chat" and options.token_ids is None,
        stream=not options.no_stream,
        exact=not options.openai_only,
    )
    return BenchPlan(
        address=address,
        form=form,
        load=load,
        warm_up=options.warmup,
        timeout_s=options.timeout,
        seed=options.seed,
        scale=options.scale,
        token_ids=options.token_ids,
        tokens_per_word=options.tokens_per_word,
    )


def _load(options: argparse.Namespace) -> Load:
    from baton.deploy.bench.load import Load, poisson, scaled

    duration_s = math.inf if options.duration is None else options.duration
    repeat = False
    if options.trace is not None or options.traffic is not None:
        requests = read_source(options)
    else:
        requests = _drawn(options, duration_s)
        repeat = options.limit is None
    requests = scaled(requests, options.scale)
    if options.rate is not None:
        requests = poisson(requests, options.rate, options.seed)
        repeat = False
    return Load(requests, options.concurrency or 0, duration_s, repeat)


def _drawn(options: argparse.Namespace, duration_s: float) -> list[TraceRequest]:
    """Return requests with lengths of --prompt and --output; their arrivals are set later."""
    from baton.planner.trace_distributions import draw_trace

    if options.rate is None and options.concurrency is None:
        raise ConfigError("nothing says when to send: give --rate, --concurrency, or --trace")
    count = options.limit
    if count is None:
        if math.isinf(duration_s):
            raise ConfigError("nothing ends the load: give --limit or --duration")
        expected = (options.rate or 0.0) * duration_s
        needed = expected + SPARE_DEVIATIONS * math.sqrt(expected) + 1
        count = REPEATED_LENGTHS if options.rate is None else min(math.ceil(needed), MAX_REQUESTS)
    return draw_trace(
        f"requests={count},rate=1,prompt={options.prompt},output={options.output},"
        f"seed={options.seed}"
    )


def _load_text(options: argparse.Namespace, load: Load) -> str:
    source = options.trace or options.traffic or f"{options.prompt} to {options.output} tokens"
    if load.clients:
        return f"closed loop, {load.clients} clients; {source}"
    arrivals = "its own times" if options.rate is None else f"Poisson, {options.rate:g} per s"
    return f"open loop, {arrivals}; {source}"


def _api_key(file: Path | None) -> str | None:
    if file is None:
        return os.environ.get("BATON_API_KEY")
    try:
        return file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error


def _first_model(url: str, api_key: str | None) -> str:
    from baton.deploy.cli.chat import ChatClient

    return ChatClient(url, api_key).models()[0].name


def _id_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if low.isdecimal() and high.isdecimal() and int(low) < int(high) <= MAX_TOKEN_ID:
        return int(low), int(high)
    raise argparse.ArgumentTypeError(f"{text!r}: give the lowest and the highest id, as 100-5000")
