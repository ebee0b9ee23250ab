"""`make soak HOURS=...`: load in a loop, and what every process holds, sampled and plotted.

    python -m chaos.soak [--hours H] [--per-s R] [--folder DIR]

Of each process: its own memory (without pages of files, which the system takes and gives as it
likes), what of it is allocated and not freed, open descriptors, tasks of its loop; of each worker
the blocks that are in use. Growth is the median slope of the memory after warm-up (Theil and Sen),
in MB an hour: a table that doubles once, early or late, counts little; in the midst of a run it
still looks like growth, as does one that doubles again and again. With its error, since a short
run cannot tell a small slope from noise. Beside it stands that of what is allocated, in the C heap
and in Python's: a leak makes both grow, a hole of the heap that is used for the first time only
the memory. Of descriptors and tasks it is the median of the last third of the samples after
warm-up, less that of their first third.

Exit code 1 if a process grew by more than 1 MB an hour, beyond twice its error, or by more than 5
descriptors or tasks, if an answer was not right, or a block is left; 3 if nothing of that was seen
but the error is too large to tell. The answers are judged as in run.py.
"""

from __future__ import annotations

from baton.runtime import tls_version  # noqa: F401  before anything imports grpc

# isort: split
import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from baton.models.training.loss_curve import COLOURS, write_curve
from benchmarks.figures.report import command, machine
from chaos.answers import Answer
from chaos.asks import Ask, asks, right_answers
from chaos.clients import Clients, Outcome, Trace
from chaos.cluster import Cluster, end_cleanly
from chaos.run import ALONE, API_KEY, FULL, SEED, SETTINGS

MAX_GROWTH_MB_H = 1.0
WARM_SHARE = 0.25  # of the run, at most WARM_MOST_S
WARM_MOST_S = 900.0
SAMPLES = 360  # in a run, at least one every 20 s
QUIET_S = 10.0
MB = 1e6
MAX_MORE = 5.0  # descriptors, and tasks, of a process
FAILED, CANNOT_TELL = 1, 3  # exit codes; 2 is for a command line that cannot be read
IN_USE = ("used", "leased", "pinned", "quarantined")
KINDS = {"memory_mb": "MB of its own", "heap_mb": "MB allocated in C",
         "python_blocks": "blocks allocated in Python", "descriptors": "open files",
         "tasks": "tasks", "blocks": "blocks in use"}  # fmt: skip


@dataclass(slots=True)
class Series:
    """The resources of one process over the minutes of the run; a list of points for each kind."""

    memory_mb: list[tuple[float, float]] = field(default_factory=list)
    heap_mb: list[tuple[float, float]] = field(default_factory=list)
    python_blocks: list[tuple[float, float]] = field(default_factory=list)
    descriptors: list[tuple[float, float]] = field(default_factory=list)
    tasks: list[tuple[float, float]] = field(default_factory=list)
    blocks: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Growth:
    """`mb_h` ± `error_mb_h` (one standard error of the slope); of other figures than MB, those."""

    mb_h: float
    error_mb_h: float

    @property
    def state(self) -> str:
        if self.mb_h - 2 * self.error_mb_h > MAX_GROWTH_MB_H:
            return "GROWS"
        return "holds" if self.mb_h + 2 * self.error_mb_h <= MAX_GROWTH_MB_H else "cannot tell"


def growth(points: Sequence[tuple[float, float]], warm_minutes: float) -> Growth:
    """The growth after `warm_minutes`: the median of the slopes between all pairs, and half of
    the half width of its interval at two standard errors, by ranks (P. K. Sen, Estimates of the
    regression coefficient based on Kendall's tau, 1968). Raises ValueError if they are fewer
    than three.

    The error counts neighbouring samples as independent, which they are not quite.
    """
    late = np.array([point for point in points if point[0] >= warm_minutes])
    count = len(late)
    if count < 3:
        raise ValueError(f"{count} samples after warm-up: let it run longer")
    first, second = np.triu_indices(count, 1)
    hours, held = late[:, 0] / 60, late[:, 1]
    slopes = np.sort((held[second] - held[first]) / (hours[second] - hours[first]))
    ranks = 2 * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = slopes[max(0, int((len(slopes) - ranks) / 2))]
    high = slopes[min(len(slopes) - 1, int((len(slopes) + ranks) / 2))]
    return Growth(float(np.median(slopes)), float(high - low) / 4)


def more(points: Sequence[tuple[float, float]], warm_minutes: float) -> float:
    """Return by how much, after `warm_minutes`, the last third's median exceeds the first's."""
    late = [held for minute, held in points if minute >= warm_minutes]
    third = -(-len(late) // 3)
    return statistics.median(late[-third:]) - statistics.median(late[:third])


def states(mine: Series, warm_minutes: float) -> dict[str, str]:
    """The verdicts on a process's memory, descriptors and tasks: holds, GROWS, cannot tell."""
    found = {"memory_mb": growth(mine.memory_mb, warm_minutes).state}
    for kind in ("descriptors", "tasks"):
        grown = more(getattr(mine, kind), warm_minutes)
        found[kind] = "GROWS" if grown > MAX_MORE else "holds"
    return found


def exit_code(heard: Iterable[str], *, wrong: int, left: int) -> int:
    """Judge the states, the answers that were not right, the workers that still hold a block."""
    said = set(heard)
    if wrong or left or "GROWS" in said:
        return FAILED
    return CANNOT_TELL if "cannot tell" in said else 0


def own_bytes(pid: int) -> int:
    """Pages in memory that belong to no file, shared ones too, as in /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return sum(1024 * int(found[name].split()[0]) for name in ("RssAnon", "RssShmem"))


def sample(cluster: Cluster, minute: float, series: dict[str, Series]) -> None:
    """Add one point of each kind for each process."""
    for name in cluster.names():
        pid, mine = cluster.pid(name), series.setdefault(name, Series())
        mine.memory_mb.append((minute, own_bytes(pid) / MB))
        mine.descriptors.append((minute, len(list(Path(f"/proc/{pid}/fd").iterdir()))))
        heard = cluster.metrics(name)
        mine.heap_mb.append((minute, heard["baton_heap_bytes"] / MB))
        mine.python_blocks.append((minute, heard["baton_python_blocks"]))
        mine.tasks.append((minute, heard["baton_tasks"]))
        if not name.startswith("router"):
            blocks = cluster.audit(name)["blocks"]
            mine.blocks.append((minute, sum(blocks[state] for state in IN_USE)))


class Soak:
    """A fleet under load for `hours`; `counts` are the answers by outcome."""

    def __init__(self, cluster: Cluster, wanted: Sequence[Ask], per_s: float) -> None:
        self.series: dict[str, Series] = {}
        self.counts: Counter[Outcome] = Counter()
        self._cluster = cluster
        self._wanted = wanted
        self._per_s = per_s

    async def run(self, clients: Clients, hours: float) -> None:
        clock = asyncio.get_running_loop().time
        began, over = clock(), asyncio.Event()
        asking = asyncio.create_task(self._ask(clients, over))
        every_s = min(20.0, hours * 3600 / SAMPLES)
        while (now := clock()) < began + hours * 3600 and not asking.done():
            await asyncio.to_thread(sample, self._cluster, (now - began) / 60, self.series)
            # Samples are taken at this period.
            await asyncio.sleep(max(0.0, now + every_s - clock()))
        over.set()
        await asking

    async def _ask(self, clients: Clients, over: asyncio.Event) -> None:
        """Send requests at an even pace; count and forget what has ended."""
        clock, running = asyncio.get_running_loop().time, set[asyncio.Task[Trace]]()
        next_s, turn = clock(), 0
        while not over.is_set():
            running.add(asyncio.create_task(clients.ask(self._wanted[turn % len(self._wanted)])))
            turn, next_s = turn + 1, next_s + 1 / self._per_s
            done, running = await asyncio.wait(running, timeout=max(0.001, next_s - clock()))
            await asyncio.sleep(max(0.0, next_s - clock()))  # Requests are sent at this rate.
            self._count(done, clients)
        if running:
            self._count((await asyncio.wait(running))[0], clients)

    def _count(self, done: set[asyncio.Task[Trace]], clients: Clients) -> None:
        for task in done:
            trace = task.result()
            assert trace.outcome is not None
            self.counts[trace.outcome] += 1
            if trace.outcome is not Outcome.RIGHT:
                heard = f"ask {trace.ask} ({trace.kind.value}): {trace.outcome.value}"
                print(f"{heard} {trace.detail}", flush=True)
        clients.traces[:] = [trace for trace in clients.traces if trace.outcome is None]


def tell(soak: Soak, hours: float, left: Mapping[str, object], folder: Path) -> int:
    """Print each process's growth, write the pictures and soak.json; the exit code."""
    warm = min(WARM_SHARE * hours * 60, WARM_MOST_S / 60)
    grown = {name: growth(mine.memory_mb, warm) for name, mine in soak.series.items()}
    said = {name: states(mine, warm) for name, mine in soak.series.items()}
    print(f"$ {command()}")
    answered = {outcome.value: count for outcome, count in soak.counts.items()}
    print(f"{hours:g} h, growth after {warm:.1f} min of warm-up; answers: {answered}")
    for (name, found), colour in zip(grown.items(), list(COLOURS) * len(grown), strict=False):
        mine = soak.series[name]
        heap, python = growth(mine.heap_mb, warm), growth(mine.python_blocks, warm)
        print(
            f"{name:<10} {colour:<7} {mine.memory_mb[-1][1]:7.1f} MB, "
            f"{found.mb_h:+7.2f} +- {found.error_mb_h:.2f} MB/h {found.state}; allocated "
            f"{heap.mb_h:+.2f} +- {heap.error_mb_h:.2f} MB/h in C and {python.mb_h:+.0f} +- "
            f"{python.error_mb_h:.0f} blocks/h in Python; descriptors "
            f"{mine.descriptors[0][1]:.0f} to {mine.descriptors[-1][1]:.0f} "
            f"({more(mine.descriptors, warm):+g}) {said[name]['descriptors']}, tasks at most "
            f"{max(count for _, count in mine.tasks):.0f} ({more(mine.tasks, warm):+g}) "
            f"{said[name]['tasks']}"
        )
    for kind, words in KINDS.items():
        runs = {name: getattr(mine, kind) for name, mine in soak.series.items()}
        write_curve(folder / f"soak-{kind}.png", runs, logarithmic=False)
        print(f"{words}: {folder / f'soak-{kind}.png'}")
    content = {
        "command": command(), "machine": machine(), "hours": hours, "answers": answered,
        "growth": {name: asdict(found) for name, found in grown.items()},
        "states": said, "left": left,
        "series": {name: asdict(mine) for name, mine in soak.series.items()},
    }  # fmt: skip
    (folder / "soak.json").write_text(json.dumps(content) + "\n")
    if left:
        print(f"still held after quiet: {left}")
    wrong = sum(count for outcome, count in soak.counts.items() if outcome is not Outcome.RIGHT)
    every = [state for kinds in said.values() for state in kinds.values()]
    code = exit_code(every, wrong=wrong, left=len(left))
    if code == CANNOT_TELL:
        print("cannot tell whether a process grows: let it run longer, on a quieter machine")
    return code


async def _soak(soak: Soak, cluster: Cluster, right: dict[int, Answer], hours: float) -> None:
    async with Clients(
        cluster.urls,
        right,
        deadline_s=60.0,
        api_key=API_KEY,
        grpc_addresses=cluster.grpc_addresses,
    ) as clients:
        await soak.run(clients, hours)


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(description="Load in a loop: does anything grow?")
    made.add_argument("--hours", type=float, default=0.5, metavar="H")
    made.add_argument("--per-s", type=float, default=4.0, metavar="R", help="requests a second")
    made.add_argument("--folder", type=Path, default=Path("results"), metavar="DIR")
    made.add_argument("--fleet", default=f"{FULL.routers},{FULL.prefill},{FULL.decode}",
                      metavar="R,P,D", help="routers, prefill and decode workers")  # fmt: skip
    options = made.parse_args(arguments)
    routers, prefill, decode = (int(count) for count in options.fleet.split(","))
    options.folder.mkdir(parents=True, exist_ok=True)
    wanted = asks(FULL.asks, SEED)
    end_cleanly()
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as text:
        right = right_answers(wanted, ALONE, Path(text))
        cluster = Cluster(Path(text), SETTINGS)
        try:
            cluster.start(prefill, decode, routers)
            soak = Soak(cluster, wanted, options.per_s)
            asyncio.run(_soak(soak, cluster, right, options.hours))
            left = dict(cluster.left_over(QUIET_S))
        finally:
            cluster.close()
    return tell(soak, options.hours, left, options.folder)


if __name__ == "__main__":
    sys.exit(main())
