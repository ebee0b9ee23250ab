"""The options --resize and --workers of `baton controller`: what is asked for workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from baton.runtime.errors import ConfigError

TargetKind = Literal["statefulset", "raycluster", "fleet"]


@dataclass(frozen=True, slots=True)
class ResizeTarget:
    """A StatefulSet, a RayCluster of KubeRay with the workers of `baton fleet --follow` in its
    pods, or such a fleet alone, which has no name. `group` of the RayCluster: that of `baton fleet
    --group`, for workers of both roles."""

    kind: TargetKind
    name: str = ""
    group: str = ""


def target_of(text: str) -> ResizeTarget:
    """Return the target that --resize names. Raises ConfigError."""
    kind, *names = text.split("/")
    wanted = {"statefulset": 1, "raycluster": 2, "fleet": 0}
    known: dict[str, TargetKind] = {each: each for each in get_args(TargetKind)}
    if kind not in known or len(names) != wanted[kind] or not all(names):
        raise ConfigError(
            f"--resize is {text[:80]!r}: write it as statefulset/NAME, as raycluster/NAME/GROUP "
            "for workers of `baton fleet --follow --group GROUP` in its pods, or as fleet for "
            "those on other nodes"
        )
    return ResizeTarget(known[kind], *names)


def bounds_of(text: str) -> tuple[int, int]:
    """Return the two numbers of `MIN-MAX`. Raises ConfigError."""
    least, separator, most = text.partition("-")
    if not separator or not least.isdecimal() or not most.isdecimal():
        raise ConfigError(f"--workers is {text[:80]!r}: write it as MIN-MAX, such as 2-8")
    if not 2 <= int(least) <= int(most):
        raise ConfigError(
            f"--workers is {text}: MIN is at least 2, one worker for each role, and at most MAX"
        )
    return int(least), int(most)
