"""One run against a server: the length of its prompts is measured, then the load is sent.

Load ─▶ run_load ─▶ send: prompt ─▶ body ─▶ HttpClient ─▶ AnswerReader ─▶ Measurement
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import orjson

from baton.deploy.bench.answer import UNFINISHED, AnswerReader, Measurement
from baton.deploy.bench.http_client import ExchangeFailed, HttpClient, ServerAddress
from baton.deploy.bench.load import Load, run_load
from baton.deploy.bench.prompts import TextPrompts, TokenIdPrompts, TokenRate
from baton.planner.traces import TraceRequest
from baton.runtime.errors import BatonError, ConfigError, Unavailable

PROBE_WORDS = (16, 320)
PROGRESS_PERIOD_S = 0.2
MAX_PAUSE_S = 30.0  # of a client after `Retry-After`
MIN_PAUSE_S = 0.05  # of a client after any error
Prompts = TextPrompts | TokenIdPrompts
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class RequestForm:
    """The fields of each request. `exact`: outputs have the wanted length, by `ignore_eos`, which
    not every server knows."""

    model: str
    chat: bool = True
    stream: bool = True
    exact: bool = True

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: str | list[int], output_tokens: int) -> bytes:
        """Return the JSON body of a request."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": output_tokens}
        if self.chat:
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.exact:
            fields["ignore_eos"] = True
        return orjson.dumps(fields)


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """All that a run needs. `token_ids`: the lowest and the highest id that prompts are made of;
    None: words. `warm_up`: so many of the first requests are not measured. `scale`: blocks of
    prompts are so many times as long as their request says."""

    address: ServerAddress
    form: RequestForm
    load: Load
    warm_up: int = 0
    timeout_s: float = 600.0
    seed: int = 0
    scale: float = 1.0
    token_ids: tuple[int, int] | None = None
    tokens_per_word: float | None = None  # None: measured


@dataclass(slots=True)
class BenchResult:
    """The requests of a run in the order in which they were sent. `interrupted`: it was ended
    early, and requests that were under way are `unfinished`."""

    measurements: list[Measurement] = field(default_factory=list)
    interrupted: bool = False


def run_bench(plan: BenchPlan, progress: Progress) -> BenchResult:
    """Run to the end, or to the first Ctrl-C. `progress` gets the requests that have ended and
    all of them, or seconds where the duration bounds the run. Raises Unavailable if no request
    reaches the server, and ConfigError if it does not say how long a prompt is."""
    return asyncio.run(_Run(plan, progress).run())


class _Run:
    def __init__(self, plan: BenchPlan, progress: Progress) -> None:
        self._plan = plan
        self._progress = progress
        self._clock = time.monotonic
        self._client = HttpClient(plan.address, self._clock)
        self._result = BenchResult()
        self._ended = 0

    async def run(self) -> BenchResult:
        self._prompts = await self._measured_prompts()
        drawing = asyncio.create_task(self._draw_progress())
        try:
            await run_load(self._plan.load, self._send, self._clock)
        except asyncio.CancelledError:  # Ctrl-C, of which asyncio.run makes a cancellation
            self._result.interrupted = True
        finally:
            drawing.cancel()
            self._client.close()
        if not self._result.interrupted:
            self._progress(*[self._total()] * 2)
        self._require_connection()
        return self._result

    async def _send(self, number: int, asked: TraceRequest, intended_s: float) -> float:
        warm_up = number < self._plan.warm_up
        measurement = Measurement(asked, warm_up, intended_s)
        self._result.measurements.append(measurement)
        body = self._plan.form.body(self._prompts.prompt(number, asked), asked.output_tokens)
        try:
            await self._exchange(body, measurement)
        finally:
            self._ended += 1
        if measurement.error is None:
            return 0.0
        return min(max(measurement.retry_after_s or 0.0, MIN_PAUSE_S), MAX_PAUSE_S)

    async def _exchange(self, body: bytes, measurement: Measurement) -> None:
        form = self._plan.form
        reader = AnswerReader(measurement, stream=form.stream)
        measurement.sent_s = self._clock()
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                await self._client.post(form.path, body, reader)
        except ExchangeFailed as error:
            measurement.fail(error.reason, str(error))
        except TimeoutError:
            measurement.fail("timeout", f"no complete answer in {self._plan.timeout_s:g} s")
        except asyncio.CancelledError:
            measurement.fail(UNFINISHED, "")
            measurement.end_s = self._clock()
            raise
        else:
            reader.finish(self._clock())
        if math.isnan(measurement.end_s):
            measurement.end_s = self._clock()

    async def _measured_prompts(self) -> Prompts:
        plan = self._plan
        if plan.token_ids is not None:
            return TokenIdPrompts(*plan.token_ids, plan.seed, plan.scale)
        if plan.tokens_per_word is not None:
            rate = TokenRate(plan.tokens_per_word)
        else:
            plain = TextPrompts(TokenRate(), plan.seed)
            counts = [(words, await self._probe(plain, words)) for words in PROBE_WORDS]
            try:
                rate = TokenRate.measured(*counts)
            except ValueError as error:
                raise ConfigError(f"prompt lengths: {error}; give --tokens-per-word") from error
        return TextPrompts(rate, plan.seed, plan.scale)

    async def _probe(self, prompts: TextPrompts, words: int) -> int:
        """Return how many tokens a prompt of so many words has, as the server counts them."""
        asked = TraceRequest(0.0, words, 1)
        measurement = Measurement(asked, True, self._clock())
        await self._exchange(
            self._plan.form.body(prompts.words(words, f"probe {self._plan.seed}"), 1), measurement
        )
        if measurement.prompt_tokens is not None:
            return measurement.prompt_tokens
        if measurement.error == "connect":
            raise Unavailable(f"the server cannot be reached: {measurement.message}")
        if measurement.error is not None:
            raise BatonError(
                f"a prompt of {words} words got no answer: {measurement.error}, "
                f"{measurement.message}"
            )
        raise ConfigError("the server does not say how long prompts are: give --tokens-per-word")

    def _require_connection(self) -> None:
        """Raise Unavailable if no request reached the server."""
        ended = [each for each in self._result.measurements if each.error != UNFINISHED]
        if ended and all(each.error == "connect" for each in ended):
            raise Unavailable(f"the server cannot be reached: {ended[0].message}")

    def _total(self) -> int:
        load = self._plan.load
        return len(load.requests) if math.isinf(load.duration_s) else math.ceil(load.duration_s)

    async def _draw_progress(self) -> None:
        start_s, total = self._clock(), self._total()
        bounded = not math.isinf(self._plan.load.duration_s)
        while True:
            done = int(self._clock() - start_s) if bounded else self._ended
            self._progress(min(done, total - 1), total)
            # The bar is redrawn at this period.
            await asyncio.sleep(PROGRESS_PERIOD_S)
