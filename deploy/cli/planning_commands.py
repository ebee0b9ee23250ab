"""The planning commands `calibrate`, `simulate` and `tune`. None needs a GPU.

`calibrate` takes lines of own measurements, published times of whole servers or of kernels, or what
a fleet that runs has recorded: its workers' steps, and the spans of its routers' traces.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from baton.deploy.bench.traffic_options import (
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
from baton.deploy.cli.arguments import add_command, add_registry, add_settings, config_of
from baton.deploy.serve.flag_values import default_of, new_file, setting, whole
from baton.runtime.errors import ConfigError

if TYPE_CHECKING:
    from baton.planner.timing_fit import Fit
    from baton.simulation.capacity.tuning_candidates import WorkerSize

DEFAULT_POOL_TOKENS = 1 << 20
_Value = TypeVar("_Value")


def add_calibrate(commands: Any) -> None:
    text = "fit a timing model for `baton simulate` to measurements, and print its errors"
    command = add_command(commands, "calibrate", text, _calibrate)
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--samples", type=Path, metavar="FILE", help="JSON lines of samples (docs/planning.md)"
    )
    source.add_argument(
        "--points", type=Path, metavar="CSV",
        help="published TTFT and TPOT, in the columns of aiconfigurator's silicon tables",
    )  # fmt: skip
    source.add_argument(
        "--tables", type=Path, metavar="FOLDER",
        help="published times of kernels, aiconfigurator's Parquet files; needs pyarrow",
    )  # fmt: skip
    source.add_argument(
        "--instance", metavar="NAME", help="a fleet running here, as `baton ps` shows it"
    )
    add_registry(source, "a cluster that runs; needs BATON_TOKEN and [security]")
    command.add_argument(
        "--router", action="append", metavar="URL", default=[],
        help="admin port of a router of that cluster, once for each; needs BATON_ADMIN_KEY",
    )  # fmt: skip
    command.add_argument("--name", required=True, help="name of the model and its device")
    command.add_argument(
        "--kv-bytes", type=whole(1, 1 << 40), metavar="N",
        help="--samples and --points: bytes of KV of one token, in all layers",
    )  # fmt: skip
    _add_published(command)
    command.add_argument(
        "--out", type=new_file, required=True, metavar="FILE", help="write the model here, as JSON"
    )
    add_settings(command)


def _add_published(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", metavar="MODEL",
        help="--points: the value of model_path; --tables: a model folder (config.json is enough) "
        "or a hub id",
    )  # fmt: skip
    command.add_argument(
        "--system", default="h200_sxm", help="--points: the device (default: %(default)s)"
    )
    command.add_argument(
        "--backend", default="vllm",
        help="--points, --tables: the server that was measured (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--tp", type=whole(1, 1024), metavar="N",
        help="--points, --tables: tensor parallelism (default: 1)",
    )  # fmt: skip
    command.add_argument(
        "--gemm-dtype", choices=("bfloat16", "fp8", "fp8_block"), default="bfloat16",
        help="--tables: dtype of matrix products (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--cache-dtype", choices=("bfloat16", "fp8"), default="bfloat16",
        help="--tables: dtype of the KV cache (default: %(default)s)",
    )  # fmt: skip


def add_simulate(commands: Any) -> None:
    text = "how a layout of workers would serve recorded or drawn traffic, on virtual time"
    command = add_command(commands, "simulate", text, _simulate)
    add_traffic(command)
    workers = whole(0, 10_000)
    command.add_argument("--prefill", type=workers, default=0, metavar="N", help="prefill workers")
    command.add_argument("--decode", type=workers, default=0, metavar="N", help="decode workers")
    command.add_argument(
        "--colocated", type=workers, default=0, metavar="N",
        help="workers that compute prompts and decode; instead of --prefill and --decode",
    )  # fmt: skip
    command.add_argument(
        "--local-chunk-tokens", type=whole(16, 1 << 20), default=512, metavar="N",
        help="prompt tokens in a step of a decode or colocated worker (default: %(default)s; a "
        "server's is 128)",
    )  # fmt: skip
    command.add_argument(
        "--placement", type=setting("router.placement"), metavar="{auto,disaggregated,local}",
        help=f"of prompts, where there are prefill workers ({default_of('router.placement')})",
    )  # fmt: skip
    command.add_argument(
        "--every-token", action="store_true", help="commit each step alone: slower, to compare"
    )


def add_tune(commands: Any) -> None:
    text = "the best workers, ratio, chunk and batch for some traffic, and whether to disaggregate"
    command = add_command(commands, "tune", text, _tune)
    add_traffic(command, sizes=True)
    command.add_argument(
        "--gpus", type=whole(1, 10_000), required=True, metavar="N", help="GPUs to divide"
    )
    command.add_argument(
        "--attainment", type=share, default=0.9, metavar="X",
        help="share of the requests that have to meet the objectives (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--simulations", type=whole(20, 10_000), default=60, metavar="N",
        help="simulations of the whole traffic at most (default: %(default)s)",
    )  # fmt: skip


def add_traffic(command: argparse.ArgumentParser, *, sizes: bool = False) -> None:
    """Add the flags of the traffic, the workers' size and the objectives. `sizes`: timing models
    and pools may be those of several sizes of a worker."""
    add_source(command, required=True)
    if sizes:
        command.add_argument(
            "--timing", type=by_gpus(Path), action="append", default=[], metavar="[GPUS=]FILE",
            help="timing model (baton calibrate) of a worker with so many GPUs, over which its "
            "model is split; again for each size to compare",
        )  # fmt: skip
        command.add_argument(
            "--pool-tokens", type=by_gpus(whole(512, 1 << 40)), action="append", default=[],
            metavar="[GPUS=]N",
            help="tokens of KV of the pool of a worker with so many GPUs (default: 1048576, or "
            "those of the fleet whose times are taken; the `memory` line of `baton size` has the "
            "real number)",
        )  # fmt: skip
    else:
        command.add_argument(
            "--timing", type=Path, metavar="FILE", help="timing model (baton calibrate)"
        )  # fmt: skip
        command.add_argument(
            "--pool-tokens", type=whole(512, 1 << 40), metavar="N",
            help="tokens of KV of each worker's pool (default: 1048576, or those of the fleet "
            "whose times are taken; the `memory` line of `baton size` has the real number)",
        )  # fmt: skip
    command.add_argument(
        "--chunk-tokens", type=whole(512, 1 << 20), default=8192, metavar="N",
        help="prompt tokens in a step of a prefill worker (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--max-sequences", type=whole(1, 4096), default=256, metavar="N",
        help="sequences in a decode batch (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--gpus-per-worker", type=whole(1, 1024), default=1, metavar="N",
        help="GPUs that the timing model's worker has (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--gpu-hour", type=positive, metavar="PRICE", help="price of a GPU for an hour"
    )
    add_reporting(command)


def by_gpus(read: Callable[[str], _Value]) -> Callable[[str], tuple[int | None, _Value]]:
    """Return a reader of "GPUS=VALUE", or of "VALUE" for the GPUs of --gpus-per-worker: None."""

    def parse(text: str) -> tuple[int | None, _Value]:
        gpus, equals, value = text.partition("=")
        if equals and gpus.isdecimal():
            return whole(1, 1024)(gpus), read(value)
        return None, read(text)

    parse.__name__ = "value"
    return parse


def _calibrate(options: argparse.Namespace) -> None:
    from baton.planner.timing_file import write_fit
    from baton.planner.timing_fit import fit_lines

    fit, missing = _fit(options)
    try:
        write_fit(fit, options.out)
    except OSError as error:
        raise ConfigError(f"{options.out} cannot be written: {error.strerror}") from error
    print("\n".join(fit_lines(fit, missing)))


def _fit(options: argparse.Namespace) -> tuple[Fit, tuple[str, ...]]:
    """Return the fit, and what its measurements do not cover beside whole kinds."""
    from baton.planner.measured_points import PointFilter, read_points
    from baton.planner.timing_file import read_samples
    from baton.planner.timing_fit import fit_timing

    if options.tables is not None:
        return _fit_tables(options)
    if options.samples is None and options.points is None:
        return _fit_recorded(options), ()
    if options.kv_bytes is None:
        raise ConfigError("--kv-bytes is missing: give the bytes of KV of one token, in all layers")
    if options.samples is not None:
        samples = read_samples(options.samples)
    elif options.model is None:
        raise ConfigError("--points has many models: name one by --model")
    else:
        chosen = PointFilter(options.model, options.system, options.backend, options.tp or 1)
        samples = read_points(options.points, chosen)
    return fit_timing(options.name, options.kv_bytes, samples), ()


def _fit_tables(options: argparse.Namespace) -> tuple[Fit, tuple[str, ...]]:
    from baton.deploy.serve import hub
    from baton.deploy.serve.kernel_tables import rank_form, read_tables
    from baton.deploy.serve.model_source import find_model
    from baton.planner.kernel_times import BETWEEN_RANKS, NOT_COVERED, kernel_samples
    from baton.planner.timing_fit import fit_timing

    if options.model is None:
        raise ConfigError(
            "--tables holds only times of kernels: give --model, from which the shape is read"
        )
    tables = read_tables(options.tables, options.backend)
    model = find_model(
        options.model, lambda line: print(line, file=sys.stderr), files=hub.SHAPE_FILES
    )
    assert model is not None  # nothing stops a download but Ctrl-C
    ranks = options.tp or 1
    form, kv_bytes = rank_form(model.folder, ranks, options.gemm_dtype, options.cache_dtype)
    fit = fit_timing(options.name, kv_bytes, kernel_samples(tables, form))
    return fit, (*NOT_COVERED, *((BETWEEN_RANKS,) if ranks > 1 else ()))


def _fit_recorded(options: argparse.Namespace) -> Fit:
    from baton.deploy.cli.control_commands import one_cluster, routers_of
    from baton.deploy.control.advice_process import read_fleet

    config, cluster = config_of(options), one_cluster(options)
    fit = read_fleet(config, cluster, routers_of(options.router, cluster.name)).fit
    return replace(fit, model=replace(fit.model, name=options.name))


def _simulate(options: argparse.Namespace) -> None:
    from baton.deploy.cli.control_commands import running_fleet
    from baton.deploy.plots.figure import require_matplotlib
    from baton.planner.timing_file import read_fit
    from baton.planner.timing_fit import error_text
    from baton.simulation.capacity.capacity_report import make_report, table
    from baton.simulation.capacity.capacity_run import run_fleet
    from baton.simulation.capacity.layout import CapacityScenario, Layout

    if options.plot is not None:
        require_matplotlib()
    layout = Layout(
        prefill=options.prefill,
        decode=options.decode,
        colocated=options.colocated,
        pool_tokens=options.pool_tokens or DEFAULT_POOL_TOKENS,
        chunk_tokens=options.chunk_tokens,
        local_chunk_tokens=options.local_chunk_tokens,
        max_sequences=options.max_sequences,
        gpus_per_worker=options.gpus_per_worker,
    )
    objectives = read_objectives(options.slo)
    if options.timing is None:
        measured = running_fleet()
        fit = measured.fit
        if options.pool_tokens is None:
            layout = replace(layout, pool_tokens=measured.layout.pool_tokens)
    else:
        fit = read_fit(options.timing)
    scenario = CapacityScenario(layout, objectives, options.gpu_hour or 0.0, options.every_token)
    if options.placement is not None:
        scenario = replace(scenario, placement=options.placement)
    requests = read_source(options)
    timing = fit.model
    started_s = time.perf_counter()
    fleet = run_fleet(scenario, timing, requests, progress_bar(layout.name))
    report = make_report(fleet, scenario, timing, time.perf_counter() - started_s)
    print(table(report))
    print(f"\ntiming model    {error_text(fit)}")
    if options.json is not None:
        write_json(options.json, report.to_json())
    if options.plot is not None:
        from baton.deploy.plots.capacity_plots import plot_simulation

        plot_simulation(options.plot, fleet, report, objectives)


def _tune(options: argparse.Namespace) -> int:
    from baton.deploy.plots.figure import require_matplotlib
    from baton.simulation.capacity.layout import Layout
    from baton.simulation.capacity.sensitivity import sensitivities, sensitivity_lines
    from baton.simulation.capacity.tuning import Search, tune
    from baton.simulation.capacity.tuning_report import (
        chart_values,
        configuration,
        met,
        tuning_table,
    )

    if options.plot is not None:
        require_matplotlib()
    base = Layout(
        colocated=1, chunk_tokens=options.chunk_tokens, max_sequences=options.max_sequences
    )
    price = options.gpu_hour or 0.0
    objectives = read_objectives(options.slo)
    search = Search(options.gpus, base, objectives, options.attainment, price, options.simulations)
    sizes, requests = _sizes(options), read_source(options)
    progress = _numbered(options.simulations)
    found = tune(search, sizes, requests, progress)
    changes = sensitivities(search, found[0], requests, progress)
    print(tuning_table(found, search))
    print("\n".join(["", *sensitivity_lines(changes, found[0])]))
    if options.json is not None:
        tuned = {
            "layouts": [
                {
                    **each.to_json(),
                    "settings": configuration(each.candidate, search),
                    "chart": chart_values(each.candidate, search),
                }
                for each in found
            ],
            "sensitivities": [each.to_json() for each in changes],
        }
        write_json(options.json, tuned)
    if options.plot is not None:
        from baton.deploy.plots.capacity_plots import plot_tuning

        plot_tuning(options.plot, found, changes, search)
    return 0 if met(found, search) else UNMET_EXIT


def _numbered(most: int) -> Callable[[str], Callable[[int, int], None]]:
    """Return a source of progress bars that counts the simulations of a search."""
    numbers = count(1)
    return lambda name: progress_bar(f"{next(numbers)} of {most} at most: {name}")


def _sizes(options: argparse.Namespace) -> list[WorkerSize]:
    """Return the sizes of a worker that are named, else that of the fleet that runs here. Raises
    ConfigError if one is named twice, or a pool has no timing model."""
    from baton.deploy.cli.control_commands import running_fleet
    from baton.planner.timing_file import read_fit
    from baton.simulation.capacity.tuning_candidates import WorkerSize

    found: dict[str, dict[int, Any]] = {"--timing": {}, "--pool-tokens": {}}
    for flag, given in (("--timing", options.timing), ("--pool-tokens", options.pool_tokens)):
        for gpus, value in given:
            count = options.gpus_per_worker if gpus is None else gpus
            if count in found[flag]:
                raise ConfigError(f"{flag} is given twice for workers of {count} GPUs")
            found[flag][count] = value
    timings, pools = found["--timing"], found["--pool-tokens"]
    own = options.gpus_per_worker
    if lost := sorted(pools.keys() - (timings.keys() or {own})):
        raise ConfigError(f"--pool-tokens {lost[0]}=... has no --timing {lost[0]}=FILE beside it")
    if not timings:
        fleet = running_fleet()
        return [WorkerSize(own, fleet.fit, pools.get(own, fleet.layout.pool_tokens))]
    return [
        WorkerSize(gpus, read_fit(path), pools.get(gpus, DEFAULT_POOL_TOKENS))
        for gpus, path in sorted(timings.items())
    ]
