"""The time that the driver of `baton fleet` takes to end, beside the grace of its workers.

Its supervisor waits for longer, so that the driver can report the workers that remain. Pure.
"""

from __future__ import annotations

WORKERS_END_S = 30.0  # for orders and answers that Ray carries
END_RETRY_S = 30.0  # for what Ray has failed to do: a head that is restarted answers sooner
RAY_CALL_S = 60.0  # a call waits so long for a head that is lost
# one such call is open when the signal comes, another one when the time to retry is over
DRIVER_END_S = WORKERS_END_S + END_RETRY_S + 2 * RAY_CALL_S
