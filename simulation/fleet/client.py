"""A client of simulated workers: submits requests, remembers what it was sent, and knows what
a run without faults gives. Stands where a router's link stands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from baton.decode_worker.sequences import RequestUpdate
from baton.proto import worker_pb2
from baton.runtime.sampling import SamplingParams
from baton.simulation.fleet.cluster import SLABS, VOCAB, Cluster
from baton.simulation.fleet.hash_engine import expected_output


class ProtocolBroken(AssertionError):
    """An output that invariant I4 forbids."""


@dataclass(slots=True, eq=False)
class Request:
    """One request as its router sees it. `asked`: the reported switches of prefill workers."""

    submit: worker_pb2.Submit
    outputs: list[worker_pb2.Output] = field(default_factory=list)
    asked: list[worker_pb2.PrefillSwitch] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def emit(self, word: RequestUpdate) -> None:
        if isinstance(word, worker_pb2.PrefillSwitch):
            self.asked.append(word)
            return
        self.outputs.append(word)
        ends = [o for o in self.outputs if o.end]
        if len(ends) == len(self.submit.choices):
            self.ended.set()

    def tokens(self, choice: int = 0) -> list[int]:
        """The output tokens of a choice; raises ProtocolBroken if an index is
        missing, repeated or late, or anything follows the end."""
        mine = [o for o in self.outputs if o.choice == choice]
        accepted = next(len(c.accepted) for c in self.submit.choices if c.choice == choice)
        with_token = [o for o in mine if o.HasField("token")]
        if [o.index for o in with_token] != list(range(accepted, accepted + len(with_token))):
            raise ProtocolBroken(f"indices {[o.index for o in with_token]}")
        if any(o.end for o in mine[:-1]):
            raise ProtocolBroken("something came after the end")
        return [o.token for o in with_token]

    def end(self, choice: int = 0) -> worker_pb2.Output:
        return next(o for o in self.outputs if o.choice == choice and o.end)

    async def finished(self, within_s: float = 20.0) -> None:
        """Wait until every choice has ended. Raises TimeoutError."""
        async with asyncio.timeout(within_s):
            await self.ended.wait()

    def expected(self, choice: int = 0) -> list[int]:
        params = SamplingParams(
            temperature=self.submit.sampling.temperature, seed=self.submit.sampling.seed
        )
        accepted = next(list(c.accepted) for c in self.submit.choices if c.choice == choice)
        return expected_output(
            [*self.submit.prompt, *accepted],
            self.submit.max_tokens - len(accepted),
            params,
            choice=choice,
            slabs=SLABS,
            vocab_size=VOCAB,
        )


class Client:
    """Submits to one decode worker, as a router's link would."""

    def __init__(self, cluster: Cluster, worker: str) -> None:
        self.cluster = cluster
        self._worker = worker
        self.requests: list[Request] = []

    def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        n: int = 1,
        local: bool = False,
        temperature: float = 0.0,
        seed: int = 1,
        accepted: list[int] | None = None,
        deadline_ms: int = 0,
        stop: tuple[int, ...] = (),
        trace: dict[str, str] | None = None,
        salt: bytes = b"",
        source: worker_pb2.Source | None = None,
        **sampling: Any,
    ) -> Request:
        """`sampling`: further fields of the message of this name."""
        number = len(self.requests)
        submit = worker_pb2.Submit(
            request_id=f"request-{number}",
            attempt=1,
            prompt=prompt,
            choices=[worker_pb2.Choice(choice=c, accepted=accepted or []) for c in range(n)],
            sampling=worker_pb2.Sampling(
                **{"top_p": 1.0, "repetition_penalty": 1.0, **sampling},
                temperature=temperature,
                seed=seed,
            ),
            max_tokens=max_tokens,
            stop_token_ids=stop,
            placement=worker_pb2.Placement(
                local=local,
                candidates=[] if local else self.cluster.candidates(),
                source=source,
            ),
            deadline_ms=deadline_ms,
            trace_context=trace,
            cache_salt=salt,
        )
        request = Request(submit)
        self.requests.append(request)
        self.cluster.decode[self._worker].worker.submit(submit, request.emit)
        return request

    def cancel(self, request: Request) -> None:
        self.cluster.decode[self._worker].worker.cancel(request.submit.request_id, 1)
