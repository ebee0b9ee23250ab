"""`baton release check`: whether a release in a cluster serves, and whether KV moves in it.

`helm test` runs it in a pod. It lists the models, asks for an answer, streams further ones, and
compares the decode workers' counters of handoffs before and after: a release in which every prompt
is prefilled on a decode worker fails the check. Holds no state.
"""

from __future__ import annotations

import http.client
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from baton.deploy.cli.chat import ChatClient, Message
from baton.runtime.errors import BatonError, ConfigError, Unavailable

TIMEOUT_S = 10.0  # for one page of metrics
# Routers join the service when they have a decode worker, seconds after the pods of workers.
READY_S, POLL_S = 60.0, 1.0
MAX_METRICS = 16 << 20  # bytes of one page
STREAMS = 4
WORDS = 240  # of a prompt: long enough that a prefill worker pays
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Sums over the decode workers that answered."""

    completed: float
    bytes_read: float


def check_release(
    client: ChatClient,
    model: str,
    decode_urls: Sequence[str],
    say: Callable[[str], None] = print,
) -> None:
    """Run all checks, and report each that passed through `say`. `client` asks the routers.
    `decode_urls` are admin ports of the decode workers; each address of a host name is one worker.
    The service has READY_S to answer at all.

    Raises BatonError with the first check that failed and what to look at.
    """
    names = _served(client)
    if model not in names:
        raise BatonError(f"the release serves {', '.join(names)}, not {model}")
    say(f"models: {', '.join(names)}")
    before = _sum_of(decode_urls)
    say(f"metrics: {before.completed:.0f} handoffs so far")
    answer = client.answer(model, _prompt(), max_tokens=ANSWER_TOKENS)
    say(f"chat: {len(answer)} characters")
    for _ in range(STREAMS):
        pieces = list(client.stream(model, _prompt(), max_tokens=ANSWER_TOKENS))
        if client.finish_reason is None:
            raise BatonError("a stream ended without a finish reason")
        say(f"stream: {len(pieces)} pieces, {client.finish_reason}")
    after = _sum_of(decode_urls)
    count = after.completed - before.completed
    if count <= 0:
        raise BatonError(
            f"no KV moved between the roles for {STREAMS + 1} prompts of {WORDS} words: each was "
            "prefilled on a decode worker. Look at baton_links on the decode workers, at "
            "baton_local_prefills_total by reason, and at router.placement"
        )
    size = after.bytes_read - before.bytes_read
    say(f"handoffs: {count:.0f} of {STREAMS + 1} prompts, {size / 1e6:.1f} MB of KV")


def _served(client: ChatClient) -> list[str]:
    """Return the names of the models. Raises Unavailable if nothing answers within READY_S."""
    given_up_s = time.monotonic() + READY_S
    while True:
        try:
            return [served.name for served in client.models()]
        except Unavailable:
            if time.monotonic() >= given_up_s:
                raise
            time.sleep(POLL_S)  # a Service tells no client when a router joins it


def _sum_of(decode_urls: Sequence[str]) -> Handoffs:
    found = [handoffs_of(each) for each in decode_urls]
    return Handoffs(sum(e.completed for e in found), sum(e.bytes_read for e in found))


def handoffs_of(decode_url: str) -> Handoffs:
    """Return the sums of all decode workers behind `decode_url`. Raises Unavailable where one
    does not answer, ConfigError for what is no URL of an admin port."""
    parts = urlsplit(decode_url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ConfigError(f"{decode_url} is no admin port: write it as http://HOST:PORT")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unavailable(f"the name {parts.hostname} has no address ({error})") from error
    addresses = sorted({str(entry[4][0]) for entry in found})
    completed = bytes_read = 0.0
    for address in addresses:
        for name, labels, value in _samples(address, parts.port):
            if name == "baton_handoffs_total" and labels.get("outcome") == "completed":
                completed += value
            elif name == "baton_handoff_bytes_total":
                bytes_read += value
    return Handoffs(completed, bytes_read)


def _samples(host: str, port: int) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of each sample of one worker."""
    where = f"http://{host}:{port}/metrics"
    with closing(http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            page = response.read(MAX_METRICS).decode()
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise Unavailable(f"{where} does not answer ({error})") from error
    if response.status != 200:
        raise Unavailable(f"{where} answered {response.status}")
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _prompt() -> list[Message]:
    """Return a chat whose prompt no worker has cached."""
    words = " ".join(secrets.token_hex(2) for _ in range(WORDS))
    return [{"role": "user", "content": f"Repeat the first of these words: {words}"}]
