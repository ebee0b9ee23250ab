"""How long `baton serve` takes from its command to `Ready at`, in this checkout and in another one.

    python -m benchmarks.start_time [--before FOLDER] [--rounds N] [--quick] [--json FILE]

One prefill and one decode worker with the embedded model, on one host. FOLDER is a checkout of an
earlier commit (`git worktree add FOLDER COMMIT`). Both run on this interpreter and its packages;
they alternate in a round, and so does which is first. A start of each before the rounds fills the
caches of compiled kernels and does not count (`--quick`: none).

start_s         median over rounds
start_before_s  the same in FOLDER
start_ratio     the first over the second, median of the rounds' ratios
cpu_s           CPU seconds of all its processes until then, median; what else runs on the machine
                changes them least
cpu_before_s    the same in FOLDER
cpu_ratio       the first over the second, median of the rounds' ratios: at most 1.05
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from benchmarks.figures.report import Figure, at_most, parser, progress, report
from benchmarks.start_time.serve_start import Start, measured_start

ROUNDS = 5
RATIO_LIMIT = 1.05
HERE = Path(__file__).resolve().parents[2]


def run(before: Path | None, rounds: int, *, warm: bool) -> list[Figure]:
    checkouts = [HERE] if before is None else [HERE, before]
    found: dict[Path, list[Start]] = {checkout: [] for checkout in checkouts}
    for checkout in checkouts if warm else ():
        progress(f"{checkout.name}, which does not count: {measured_start(checkout)}")
    for number in range(rounds):
        for checkout in checkouts if number % 2 else checkouts[::-1]:
            found[checkout].append(measured_start(checkout))
            progress(f"{checkout.name}: {found[checkout][-1]}")
    earlier = None if before is None else found[before]
    wall = _figures("start", found[HERE], earlier, attrgetter("wall_s"))
    cpu = _figures("cpu", found[HERE], earlier, attrgetter("cpu_s"))
    if earlier is not None:
        limited = at_most("cpu_ratio", cpu[-1].value, RATIO_LIMIT)
        cpu[-1] = replace(limited, beside=f"{limited.beside}; {cpu[-1].beside}")
    return [*wall, *cpu, Figure("rounds", rounds)]


def _figures(
    name: str,
    here: Sequence[Start],
    before: Sequence[Start] | None,
    seconds_of: Callable[[Start], float],
) -> list[Figure]:
    """Return the median of one time, of the other checkout too, and the median ratio."""
    own = [seconds_of(start) for start in here]
    found = [Figure(f"{name}_s", statistics.median(own), "s", _range(own))]
    if before is not None:
        other = [seconds_of(start) for start in before]
        ratios = [after / earlier for after, earlier in zip(own, other, strict=True)]
        found.append(Figure(f"{name}_before_s", statistics.median(other), "s", _range(other)))
        found.append(Figure(f"{name}_ratio", statistics.median(ratios), "", _range(ratios)))
    return found


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    before = options.before.absolute() if options.before else None
    report(run(before, options.rounds, warm=not options.quick), options.json)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("How long baton serve takes to be ready, here and in another checkout")
    made.add_argument("--before", type=Path, metavar="FOLDER", help="a checkout to compare with")
    made.add_argument("--rounds", type=int, default=ROUNDS)
    made.add_argument("--quick", action="store_true", help="no start before the rounds")
    return made.parse_args(arguments)


if __name__ == "__main__":
    main()
