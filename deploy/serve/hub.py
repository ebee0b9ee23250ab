"""A model from the hub, fetched by a child process, which can be ended at any moment.

    python -m baton.deploy.serve.hub OWNER/NAME REVISION PATTERN...
    prints one line of JSON: the folder, or the reason why there is none

A revision is a commit, a tag or a branch; empty: the hub's default branch. The library makes it a
commit once, and takes every file of a folder from that commit.
It downloads in threads that it waits for; `baton serve` cannot be stopped while it does so itself.
The child draws its progress bars on the same terminal, and ends with its parent.
The hub's exceptions are translated here, and only here. Keeps no state but the hub's own cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from baton.runtime.errors import ModelError

SHAPE_FILES = ["config.json", "generation_config.json"]
FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja"]
TICK_S = 0.1


def fetch(
    hub_id: str,
    stopped: Callable[[], bool],
    revision: str | None = None,
    files: Sequence[str] = FILES,
) -> Path | None:
    """Return the folder of the model's `files` (patterns) in the hub's cache; None if `stopped`,
    which is polled, returned true, after which the child has ended. Raises ModelError with the
    remedy."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "baton.deploy.serve.hub", hub_id, revision or "", *files],
        stdin=subprocess.PIPE,  # its end, however this process ends, ends the child
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # the terminal's Ctrl-C is for the parent
    )
    with child:
        try:
            while not stopped():
                try:
                    code = child.wait(TICK_S)
                except subprocess.TimeoutExpired:
                    continue
                assert child.stdout is not None
                return _answer(hub_id, code, child.stdout.read())
            return None
        finally:
            child.kill()  # of no effect on one that has ended


def _answer(hub_id: str, code: int, out: str) -> Path:
    """`out` is what the child has printed: one line, which a pipe holds until it is read."""
    if code:
        raise ModelError(
            f"fetching {hub_id} ended with exit code {code}: see above, or download the model "
            "elsewhere and give its folder"
        )
    answer = json.loads(out.splitlines()[-1])
    if "error" in answer:
        raise ModelError(answer["error"])
    return Path(answer["folder"])


def download(hub_id: str, revision: str, *files: str) -> Path:
    """The folder of the model in the hub's cache. Raises ModelError naming the remedy."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise ModelError(
            "hub ids need huggingface_hub: pip install 'baton-serve[worker]', or give a folder"
        ) from error
    try:
        wanted = list(files)
        return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=wanted))
    except GatedRepoError as error:
        raise ModelError(
            f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"there is no folder {hub_id}, and the hub has no such model for you: check the "
            "spelling; for a private one set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(
            f"{hub_id} has no revision {revision}: give a commit, tag or branch that the hub shows"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"there is no folder {hub_id}, and the hub cannot be reached "
            f"({' '.join(str(error).split())}): "
            "download the model elsewhere and give its folder"
        ) from error


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing is ever written: it returns when the parent is gone
    os._exit(1)  # the library's own threads would be waited for otherwise


def main() -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = {"folder": str(download(*sys.argv[1:]))}
    except ModelError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
