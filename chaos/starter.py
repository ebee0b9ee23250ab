"""Processes that end with the one that started them, kill -9 included.

The kernel kills a child (PR_SET_PDEATHSIG) once the *thread* that started it has ended. So one
thread, which lives as long as this process, starts all. A stopped process is killed too; a command
that goes on under another one (`ip netns exec`) keeps it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

# A process of its own sets it before it becomes the command: no code of this one, which has many
# threads, runs between fork and exec. A child whose parent has ended by then would hear of it no
# more.
BOUND_PROGRAM = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, signal.SIGKILL):
    sys.exit("it cannot be bound to the process that starts it (prctl)")
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""
_STARTER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")


def start(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """A process that writes into `log`; its pid is the command's own."""
    bound = [sys.executable, "-I", "-S", "-c", BOUND_PROGRAM, str(os.getpid()), *command]
    return _STARTER.submit(
        subprocess.Popen, bound, env=environment, stdout=log, stderr=log
    ).result()
