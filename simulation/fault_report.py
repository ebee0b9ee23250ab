"""Many seeds: runs them, on several cores if asked to, and says what was found.

    baton faults --seeds 2000 --jobs 2 --json FILE       past bugs first, then seeds 0 to 1999
    baton faults --from 17 --seeds 1 --keep 3,8          a part of one seed's events

Processes share nothing: each gets a range of seeds on its command line and writes a report, which
is added to the others. Knows the lab; prints for people and writes JSON for machines.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from baton.runtime import logs
from baton.runtime.errors import ConfigError
from baton.simulation import lab
from baton.simulation.fleet.draw_scenario import draw
from baton.simulation.fleet.engine_kind import HASHES, EngineKind
from baton.simulation.fleet.scenario import BLOCK, Scenario
from baton.simulation.mutations import mutations, patches, regressions

MAX_VOID = 9  # void seeds that are named
MAX_SHORTENED = 5  # failing seeds: it takes many runs each; of others all events are kept
TELL_S = 30.0  # between two lines about how far a process is


@dataclass(slots=True)
class Report:
    """Keys of the JSON. `seeds` are those that were asked for, `past` those of past bugs; all
    else counts both. `void_seeds` are the first ones of those that were asked for. `violations`
    are texts, one of each failing seed, with how to repeat it."""

    seeds: int = 0
    past: int = 0
    void: int = 0
    void_past: int = 0
    void_seeds: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    failing_seeds: list[int] = field(default_factory=list)
    requests: int = 0
    migrations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    seeds_per_s: float = 0.0
    mutation: str | None = None

    def add(self, outcome: lab.Outcome, *, past: bool) -> None:
        self.past += past
        self.seeds += not past
        self.void += outcome.void
        self.void_past += outcome.void and past
        if outcome.void and not past:
            self.void_seeds = [*self.void_seeds, outcome.seed][:MAX_VOID]
        self.requests += outcome.requests
        self.migrations += outcome.migrations
        self.virtual_s += outcome.virtual_s
        self.faults.update(outcome.faults)
        self.ends.update(outcome.ends)
        if outcome.breaches:
            self.failing_seeds.append(outcome.seed)

    def merge(self, other: dict[str, Any]) -> None:
        for name in ("seeds", "past", "void", "void_past", "requests", "migrations", "virtual_s"):
            setattr(self, name, getattr(self, name) + other[name])
        self.void_seeds = [*self.void_seeds, *other["void_seeds"]][:MAX_VOID]
        self.violations += other["violations"]
        self.failing_seeds += other["failing_seeds"]
        self.faults.update(other["faults"])
        self.ends.update(other["ends"])

    def timed(self, seconds: float) -> None:
        self.seeds_per_s = round((self.seeds + self.past) / seconds, 1)

    @property
    def proves_nothing(self) -> bool:
        """Whether every seed that was asked for was void."""
        return 0 < self.seeds == self.void - self.void_past

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def run(
    first: int,
    count: int,
    *,
    mutation: str | None = None,
    keep: Sequence[int] | None = None,
    stop_at_first: bool = False,
    past: bool = True,
    kind: EngineKind = HASHES,
) -> Report:
    """Run past bugs' seeds and then `count` seeds from `first` on, in this process. `keep` are
    events of those seeds: past bugs, which have others, are left out then. Raises ConfigError if a
    seed has not so many."""
    logs.setup("faults", "critical")
    how = _How(mutation, _named(mutation), kind)
    gc.collect()
    gc.freeze()  # what is there already: each collection between two runs would look through it
    try:
        past = past and keep is None
        return _run(first, count, how, keep, stop_at_first=stop_at_first, past=past)
    finally:
        gc.unfreeze()


@dataclass(frozen=True, slots=True)
class _How:
    """Seeds are run so."""

    mutation: str | None
    broken: patches.Mutation
    kind: EngineKind

    def run(self, scenario: Scenario) -> lab.Outcome:
        outcome = lab.run(scenario, self.broken, kind=self.kind)
        if self.mutation is not None:  # what only breaks down is not caught
            outcome.breaches = patches.broken_promises(outcome.breaches)
        return outcome

    def arguments(self) -> str:
        engine = f" --engine {self.kind.name}" if self.kind is not HASHES else ""
        return engine + ("" if self.mutation is None else f" --mutation {self.mutation}")


def _run(
    first: int,
    count: int,
    how: _How,
    keep: Sequence[int] | None,
    *,
    stop_at_first: bool,
    past: bool,
) -> Report:
    report = Report(mutation=how.mutation)
    started_s = shown_s = time.perf_counter()
    before = regressions.seeds() if past else []
    for number, seed in enumerate([*before, *range(first, first + count)]):
        outcome = how.run(_scenario(seed, keep))
        report.add(outcome, past=number < len(before))
        if outcome.breaches:
            shorten = keep is None and len(report.failing_seeds) <= MAX_SHORTENED
            report.violations.append("\n".join(_shown(outcome, how, keep, shorten=shorten)))
            if stop_at_first:
                break
        if time.perf_counter() - shown_s > TELL_S:
            shown_s = time.perf_counter()
            report.timed(shown_s - started_s)
            print(f"from {first} to {seed}: {summary_line(report)}", file=sys.stderr, flush=True)
    report.timed(time.perf_counter() - started_s)
    return report


def _scenario(seed: int, keep: Sequence[int] | None) -> Scenario:
    scenario = draw(seed)
    if keep is None:
        return scenario
    last = len(scenario.events) - 1
    if any(index > last for index in keep):
        raise ConfigError(f"--keep: seed {seed} has the events 0 to {last}")
    return scenario.only(tuple(keep))


def _named(name: str | None) -> patches.Mutation:
    """Return a deliberate break, or a past bug without its fix; for None, nothing is broken."""
    if name is None:
        return nullcontext
    bug = regressions.PAST_BUGS.get(name)
    return partial(patches.applied, bug.undo) if bug else mutations.named(name)


def _shown(
    outcome: lab.Outcome, how: _How, keep: Sequence[int] | None, *, shorten: bool
) -> list[str]:
    """A failing seed and the line that repeats it, as short as it can be made if asked to."""
    scenario = draw(outcome.seed)
    command = f"baton faults --from {outcome.seed} --seeds 1"
    kept = () if keep is None else tuple(keep)
    breaches = outcome.breaches
    if shorten:
        kept = lab.shrink(scenario, lambda shorter: bool(how.run(shorter).breaches))
        breaches = how.run(scenario.only(kept)).breaches
        if not breaches:  # a run depended on more than its seed: a defect of the lab itself
            text = [f"seed {outcome.seed} does not repeat: {outcome.breaches[0]}"]
            return [*text, *outcome.breaches[1:4], f"  again: {command}{how.arguments()}"]
    if shorten or keep is not None:
        command += f" --keep {','.join(map(str, kept))}"
    command += how.arguments()
    events = [f"  {index}: {scenario.events[index]}" for index in kept] if shorten else []
    return [f"seed {outcome.seed}: {breaches[0]}", *breaches[1:4], *events, f"  again: {command}"]


def run_jobs(first: int, count: int, jobs: int, model: Path | None) -> Report:
    """The same in `jobs` processes of this Python, past bugs before them in this one. Raises
    ConfigError if one of them fails; then no other goes on."""
    started_s = time.perf_counter()
    report = run(first, 0, kind=_kind(model))
    with tempfile.TemporaryDirectory() as folder:
        starts = [first + count * job // jobs for job in range(jobs + 1)]
        processes = [
            start_job(starts[job], starts[job + 1], job, model, Path(folder)) for job in range(jobs)
        ]
        try:
            for job, process in enumerate(processes):
                if process.wait():
                    which = f"seeds {starts[job]} to {starts[job + 1] - 1}"
                    raise ConfigError(f"the process of {which} ended with {process.returncode}")
                report.merge(json.loads((Path(folder) / f"{job}.json").read_text()))
        finally:
            for process in processes:
                process.kill()
                process.communicate()  # waits, and closes its stdin
    report.timed(time.perf_counter() - started_s)
    return report


def start_job(
    first: int, end: int, job: int, model: Path | None, folder: Path
) -> subprocess.Popen[bytes]:
    """Start a process that runs the seeds from `first` to `end` and reports to `folder`."""
    command = [
        *(sys.executable, "-P", "-m", "baton.simulation.fault_report"),
        *(str(first), str(end - first), str(folder / f"{job}.json")),
        *([] if model is None else [str(model)]),
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def faults(
    first: int,
    count: int,
    *,
    jobs: int = 1,
    json_file: Path | None = None,
    mutation: str | None = None,
    keep: Sequence[int] | None = None,
    model: Path | None = None,
) -> int:
    """Run `baton faults`; return the exit code: 1 if a promise was broken, if a mutation was not
    noticed, or if every seed was void (a part of one, which `keep` makes, may be). `model`: the
    folder of what the fleets compute with, instead of hashes."""
    if count < 1 or jobs < 1:
        raise ConfigError("--seeds and --jobs: give 1 or more")
    if json_file is not None and not json_file.parent.is_dir():
        raise ConfigError(f"--json {json_file}: there is no folder {json_file.parent}")
    if jobs > 1 and keep is None and mutation is None:
        report = run_jobs(first, count, min(jobs, count), model)
    else:
        kind, stop = _kind(model), mutation is not None
        report = run(first, count, mutation=mutation, keep=keep, stop_at_first=stop, kind=kind)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n")
    print("\n".join([*report.violations, summary_line(report)]))
    if report.proves_nothing and keep is None and not report.failing_seeds:
        print("every seed was void: too little load before its fault, so nothing has been proved")
        return 1
    return int(bool(report.failing_seeds) != (mutation is not None))


def _kind(model: Path | None) -> EngineKind:
    if model is None:
        return HASHES
    from baton.simulation.fleet.model_engine import (
        ModelKind,  # with torch, which hashes do not need
    )

    return ModelKind(model, BLOCK)


def summary_line(report: Report) -> str:
    """Return the counts of `report` as one line of text."""
    failing = len(report.failing_seeds)
    which = f" ({', '.join(map(str, report.failing_seeds[:9]))})" if failing else ""
    past = f" and {report.past} of past bugs" if report.past else ""
    named = ", ".join(map(str, report.void_seeds))
    more = ", ..." if report.void - report.void_past > len(report.void_seeds) else ""
    void = f"{report.void} void" + (f": {named}{more}" if named else "")
    text = (
        f"{report.seeds} seeds{past} ({void}), {report.requests} requests, "
        f"{sum(report.faults.values())} faults, {report.migrations} migrations, "
        f"{failing} failing seeds{which}, {report.seeds_per_s:g} seeds/s"
    )
    if report.mutation is None:
        return text
    verdict = f"caught by seed {report.failing_seeds[0]}" if failing else "NOT CAUGHT"
    return f"{text}; mutation {report.mutation}: {verdict}"


def main(arguments: Sequence[str]) -> None:
    """One process of several: FIRST COUNT FILE [MODEL]. Ends with the one that holds its stdin."""
    first, count, file, *model = arguments
    threading.Thread(target=_end_with_parent, daemon=True).start()
    kind = _kind(Path(model[0]) if model else None)
    report = run(int(first), int(count), past=False, kind=kind)
    Path(file).write_text(json.dumps(report.as_json()))


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing is ever written
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
