"""A prefill and a decode worker as real processes, and a link to them as a router has it.

Started as `baton serve` starts its workers: the cores are divided among the two, OpenMP does
not spin. The benchmark that made the pair owns the processes; `close` ends them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.deploy.host.authority import Authority
from baton.proto import worker_pb2, worker_pb2_grpc
from baton.runtime.config import Config
from baton.runtime.grpc_links import ClientLink, credentials, open_channel
from baton.runtime.links import LINK_PROTOCOL_VERSION
from baton.runtime.registry import DirectoryRegistry, WorkerRecord
from baton.runtime.settings.loading import load
from baton.runtime.tls import Tls

ROLES = ("prefill", "decode")
START_S = 900.0  # to load the model and compile kernels on a busy machine; a dead worker ends it
HEARTBEAT_S = 0.5
ANSWER_S = 600.0  # of 2,000 tokens of prompt
GREEDY = worker_pb2.Sampling(top_p=1.0, repetition_penalty=1.0, seed=1)


def chunk_settings(tokens: int) -> list[str]:
    """Settings with which both roles compute prompts in chunks of so many tokens, one a step."""
    names = ("chunk_tokens", "prefill_tokens", "local_prefill_tokens")
    return [f"step.{name}={tokens}" for name in names]


class WorkerPair:
    """`settings` are `section.key=value`, the same for both; `by_role` adds to one's. `more`: the
    own settings of further decode workers, decode-1 and up. They speak TLS; a process that calls
    them does so with `tls`."""

    def __init__(
        self,
        model: Path,
        settings: Sequence[str],
        by_role: Mapping[str, Sequence[str]] | None = None,
        *,
        more: Sequence[Sequence[str]] = (),
    ) -> None:
        self.token = secrets.token_hex(16)
        self.threads = max(1, len(os.sched_getaffinity(0)) // len(ROLES))
        self._folder = tempfile.TemporaryDirectory(prefix="baton-benchmark-")
        folder = Path(self._folder.name)
        self._registry = DirectoryRegistry(folder / "registry")
        self._log = folder / "workers.log"
        self._authority = Authority(folder / "tls")
        own_files = self._authority.issue("benchmark", host=None)
        self.tls = Tls(load(None, {}, own_files.settings()).security)
        own = {f"{role}-0": (by_role or {}).get(role, ()) for role in ROLES}
        own |= {f"decode-{number}": each for number, each in enumerate(more, start=1)}
        self._processes = {
            name: self._start(name, model, [*settings, *given]) for name, given in own.items()
        }

    def wait_ready(self) -> dict[str, WorkerRecord]:
        """The records of the pair, by role, once all workers are ready. Raises RuntimeError if one
        does not come."""
        deadline = time.monotonic() + START_S
        while True:
            names = {record.worker_id for record in self._registry.workers()}
            if names == self._processes.keys():
                return {role: self.record(f"{role}-0") for role in ROLES}
            ended = [name for name, each in self._processes.items() if each.poll() is not None]
            if ended or time.monotonic() > deadline:
                why = f"{ended[0]} ended" if ended else f"not ready within {START_S:g} s"
                log = self._log.read_text()[-3000:]
                raise RuntimeError(f"the workers did not start ({why}):\n{log}")
            time.sleep(0.1)  # workers announce themselves in files

    def record(self, name: str) -> WorkerRecord:
        """The record of a ready worker."""
        (found,) = [each for each in self._registry.workers() if each.worker_id == name]
        return found

    def records(self) -> list[WorkerRecord]:
        """The records of all ready workers."""
        return self._registry.workers()

    def close(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
        self._folder.cleanup()

    def _start(self, name: str, model: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
        role = name.split("-")[0]
        command = [sys.executable, "-P", "-m", "baton.deploy.cli.main", "worker"]
        command += ["--role", role, "--worker-id", name, "--model", str(model)]
        command += ["--registry", str(self._log.parent / "registry")]
        files = self._authority.issue(name, Config().worker.host).settings()
        command += [f"--set={setting}={file}" for setting, file in files.items()]
        command += [f"--set={setting}" for setting in settings]
        environment = os.environ | {
            "BATON_TOKEN": self.token,
            "OMP_WAIT_POLICY": "passive",
            "GOMP_SPINCOUNT": "0",
            "OMP_NUM_THREADS": str(self.threads),
        }
        with open(self._log, "ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def _candidate(record: WorkerRecord) -> worker_pb2.Candidate:
    return worker_pb2.Candidate(
        worker_id=record.worker_id,
        boot_id=bytes.fromhex(record.boot_id),
        address=record.address,
    )


@dataclass(slots=True)
class Answer:
    """The result of a submit: when each token arrived, in seconds of `time.perf_counter()`."""

    trace_id: str
    submitted: float
    arrived: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    accepted_proposals: int = 0
    rejected_proposals: int = 0

    @property
    def ttft_s(self) -> float:
        return self.arrived[0] - self.submitted

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrived, self.arrived[1:], strict=False)]


class RouterLink:
    """A router's link to the decode worker; one request at a time."""

    def __init__(self, records: dict[str, WorkerRecord], token: str, tls: Tls) -> None:
        self.candidate = _candidate(records["prefill"])
        self._decode = _candidate(records["decode"])
        self._channel = open_channel(records["decode"].address, tls)
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._link: ClientLink[worker_pb2.RouterMessage, worker_pb2.WorkerMessage]
        self._link = ClientLink(stub.Link(metadata=credentials(token)))
        self._sending = asyncio.Lock()

    async def open(self) -> worker_pb2.WorkerHello:
        hello = worker_pb2.RouterHello(
            router_id="benchmark",
            boot_id=secrets.token_bytes(16),
            protocol_version=LINK_PROTOCOL_VERSION,
        )
        await self._send(worker_pb2.RouterMessage(hello=hello))
        self._beating = asyncio.create_task(self._beat())
        return (await self._link.receive()).hello

    async def ask(
        self,
        prompt: Sequence[int],
        output_tokens: int,
        *,
        local: bool,
        held_blocks: int = 0,
        sampling: worker_pb2.Sampling = GREEDY,
        stops: Sequence[int] = (),
    ) -> Answer:
        """Send one request and wait for its end. The prefill worker may READ `held_blocks` from the
        decode worker. `stops`: tokens that end the answer. Raises RuntimeError if the request
        fails."""
        source = worker_pb2.Source(worker=self._decode, blocks=held_blocks) if held_blocks else None
        trace_id, request_id = secrets.token_hex(16), secrets.token_hex(8)
        submit = worker_pb2.Submit(
            request_id=request_id,
            prompt=prompt,
            choices=[worker_pb2.Choice(choice=0)],
            sampling=sampling,
            max_tokens=output_tokens,
            stop_token_ids=stops,
            placement=worker_pb2.Placement(
                local=local, candidates=[] if local else [self.candidate], source=source
            ),
            trace_context={"traceparent": f"00-{trace_id}-{secrets.token_hex(8)}-01"},
        )
        answer = Answer(trace_id, time.perf_counter())
        async with asyncio.timeout(ANSWER_S):
            await self._send(worker_pb2.RouterMessage(submit=submit))
            while not await self._take(answer, request_id):
                pass
        settled = worker_pb2.Settled(request_ids=[request_id])
        await self._send(worker_pb2.RouterMessage(settled=settled))
        return answer

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        await self._link.close()
        await self._channel.close()

    async def _take(self, answer: Answer, request_id: str) -> bool:
        """Take one message; whether it ended the request."""
        message = await self._link.receive()
        now, over = time.perf_counter(), False
        for output in message.outputs.outputs:
            if output.request_id != request_id:
                continue
            if output.HasField("token"):
                answer.arrived.append(now)
                answer.tokens.append(output.token)
            answer.accepted_proposals += output.accepted_proposal
            answer.rejected_proposals += output.rejected_proposals
            if output.end in (worker_pb2.FAILED, worker_pb2.CANCELLED):
                raise RuntimeError(f"the request failed: {output.failure}")
            over = over or output.end != worker_pb2.NOT_ENDED
        return over

    async def _beat(self) -> None:
        while True:
            # A router sends heartbeats at this period.
            await asyncio.sleep(HEARTBEAT_S)
            await self._send(worker_pb2.RouterMessage(heartbeat=worker_pb2.Heartbeat()))

    async def _send(self, message: worker_pb2.RouterMessage) -> None:
        async with self._sending:
            await self._link.send(message)
