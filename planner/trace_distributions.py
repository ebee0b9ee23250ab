"""Traffic drawn from distributions, where there is no trace.

    requests=1000,rate=4,prompt=lognormal:2000:0.8,output=exponential:300,seed=7

Arrivals are a Poisson process of `rate` requests a second. A length is a `constant:N`,
`uniform:LOW:HIGH`, `exponential:MEAN` or `lognormal:MEDIAN:SIGMA`, rounded, and at least 1. The
same text gives the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from baton.planner.traces import MAX_REQUESTS, MAX_TOKENS, TraceRequest
from baton.runtime.errors import ConfigError

DEFAULTS = {"seed": "0"}
MAX_SIGMA = 20.0  # with a larger one the draws leave the range of floats
WANTED = ("requests", "rate", "prompt", "output")
_Draw = Callable[[random.Random], float]
# By name: its parameters, and the draw that they give.
_LENGTHS: dict[str, tuple[int, Callable[..., _Draw]]] = {
    "constant": (1, lambda value: lambda rng: float(value)),
    "uniform": (2, lambda low, high: lambda rng: rng.uniform(low, high)),
    "exponential": (1, lambda mean: lambda rng: rng.expovariate(1 / mean)),
    "lognormal": (2, lambda median, sigma: lambda rng: median * rng.lognormvariate(0, sigma)),
}


def draw_trace(text: str) -> list[TraceRequest]:
    """Return the requests that `text` describes. Raises ConfigError, which names the field."""
    values = dict(DEFAULTS)
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals or name.strip() not in {*WANTED, *DEFAULTS}:
            raise ConfigError(
                f"{part.strip()!r} in the distributions: give {', '.join([*WANTED, *DEFAULTS])}, "
                "each as name=value"
            )
        values[name.strip()] = value.strip()
    missing = [name for name in WANTED if name not in values]
    if missing:
        raise ConfigError(f"the distributions lack {', '.join(missing)}")
    count = int(_number(values["requests"], "requests", 1, MAX_REQUESTS))
    rate = _number(values["rate"], "rate", 1e-6, 1e6)
    rng = random.Random(int(_number(values["seed"], "seed", 0, 1 << 53)))
    prompt, output = (_length(values[name], name) for name in ("prompt", "output"))
    requests, now_s = [], 0.0
    for _ in range(count):
        requests.append(TraceRequest(now_s, _tokens(prompt(rng)), _tokens(output(rng))))
        now_s += rng.expovariate(rate)
    return requests


def _tokens(drawn: float) -> int:
    return max(1, min(round(drawn), MAX_TOKENS))


def _length(text: str, name: str) -> _Draw:
    kind, *numbers = text.split(":")
    if kind not in _LENGTHS:
        raise ConfigError(f"{name} is {text!r}: its distribution is one of {', '.join(_LENGTHS)}")
    wanted, draw = _LENGTHS[kind]
    if len(numbers) != wanted:
        raise ConfigError(f"{name} is {text!r}: {kind} takes {wanted} numbers, as {kind}:N")
    first, *more = numbers
    most = MAX_SIGMA if kind == "lognormal" else MAX_TOKENS
    bounded = (_number(each, name, 1e-6, most) for each in more)
    return draw(_number(first, name, 1e-6, MAX_TOKENS), *bounded)


def _number(text: str, name: str, low: float, high: float) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}, not a number") from None
    if not low <= value <= high:
        raise ConfigError(f"{name} is {text}, not from {low:g} to {high:g}")
    return value
