"""A worker's entry in the registry: announced again and again, withdrawn at its end.

A registry that fails or hangs ends no request: the entry fades, and links go on. Holds no state.
"""

from __future__ import annotations

import asyncio

from baton.runtime import logs, waits
from baton.runtime.registry import WorkerRecord
from baton.runtime.registry_client import ANSWER_S, RegistryClient, RegistryUnavailable, hung

ANNOUNCE_INTERVAL_S = 3.0
RETRY_S = 1.0  # after a failure: one that takes ANSWER_S still leaves an entry's lifetime time

log = logs.get(__name__)


async def announce(registry: RegistryClient, record: WorkerRecord) -> None:
    """Announce the worker every ANNOUNCE_INTERVAL_S until cancelled, and RETRY_S after a failure.
    The first success is logged with the time that it took: a worker that is found late was either
    ready late, or registered late. Raises ConfigError for a record that no registry would take."""
    clock = asyncio.get_running_loop().time
    begun_s, registered = clock(), False
    logged: str | None = None
    while True:
        announcing = registry.announce(record)
        while not await waits.done_within(announcing, ANSWER_S):
            logged = _log_failure(hung(ANSWER_S), logged)
        why, pause_s = None, ANNOUNCE_INTERVAL_S
        try:
            announcing.result()
        except RegistryUnavailable:  # its client has logged it
            pause_s = RETRY_S
        except OSError as error:  # a full disk ends no request; the entry fades
            why, pause_s = str(error), RETRY_S
        else:
            if not registered:
                took_s = round(clock() - begun_s, 3)
                log.info("worker registered", boot_id=record.boot_id, since_ready_s=took_s)
            registered = True
        logged = _log_failure(why, logged)
        # An entry ends unless the worker repeats it in time.
        await asyncio.sleep(pause_s)


def _log_failure(why: str | None, logged: str | None) -> str | None:
    """Log why the worker is not announced, once for each reason; return the reason."""
    if why is not None and why != logged:
        log.error("worker not announced", reason=why)
    return why


async def withdraw(registry: RegistryClient, record: WorkerRecord) -> None:
    """Withdraw the worker's entry, or leave it to fade after ANSWER_S."""
    withdrawing = registry.withdraw(record.worker_id, record.boot_id)
    try:
        if not await waits.done_within(withdrawing, ANSWER_S):
            raise TimeoutError(hung(ANSWER_S))
        withdrawing.result()
    except RegistryUnavailable:
        pass  # its client has logged it
    except OSError as error:
        log.error("worker not withdrawn", reason=str(error))
