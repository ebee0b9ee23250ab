"""Takes the pictures of docs/console.md again: `make pictures`.

    python -m tests.support.console_pictures [FOLDER]

A real fleet of `baton serve` under some load, advice for it, and a decode worker that is killed.
Needs build/clients/browser (`make clients`) and Chromium. Takes two minutes on an idle machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.support.machine_speed import slowness

ROOT = Path(__file__).resolve().parents[2]
BROWSER = ROOT / "build" / "clients" / "browser" / "bin" / "python"
PROGRAM = ROOT / "tests" / "clients" / "programs" / "console_pictures.py"
BATON = (sys.executable, "-P", "-m", "baton.deploy.cli.main")
SETTINGS = ("--set", "slo.ttft_s=1", "--set", "slo.itl_s=0.1")
CLIENTS = 4
START_S, SHOWN_S = 150 * slowness(), 40 * slowness()
TOPICS = ("the fox Rosa", "a red kite", "the garden in spring", "seven stones and a river")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, str, Path]]:
    """Start a fleet; yield the URLs of its API and its console, and the instance's folder."""
    environment = os.environ | {"XDG_RUNTIME_DIR": str(folder)}
    command = (*BATON, "serve", "--prefill", "2", "--decode", "2", "--port", "0", *SETTINGS)
    serving = await asyncio.create_subprocess_exec(
        *(*command, "--launcher", "process", "--placement", "disaggregated"),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    assert serving.stdout is not None
    api = console = ""
    try:
        async with asyncio.timeout(START_S):
            while not (api and console):
                line = (await serving.stdout.readline()).decode()
                if not line:
                    raise SystemExit("baton serve has ended: see above")
                words = line.split()
                found = [word.strip("(),:") for word in words if word.startswith("http://")]
                if line.startswith("Console at "):
                    console = found[0]
                elif found and not api:
                    api = found[0]
        (instance,) = (folder / "baton").glob("pid-*")
        yield api, console, instance
    finally:
        serving.send_signal(signal.SIGINT)
        await serving.communicate()


async def ask(api: str, client: int) -> None:
    """Stream chats that share beginnings, one after another, until cancelled. Their prompts are
    long enough that steps of many lengths show what a prompt's token costs."""
    draws = random.Random(client)
    async with httpx.AsyncClient(base_url=api.removesuffix("/v1"), timeout=120) as http:
        while True:
            asked = [
                f"Tell a story about {topic}."
                for topic in draws.choices(TOPICS, k=draws.randint(24, 120))
            ]
            messages = [
                {"role": "system", "content": "You tell short stories to children. " * 12},
                {"role": "user", "content": " ".join(asked)},
            ]
            body = {"model": "baton-tiny", "messages": messages, "max_tokens": 60, "stream": True}
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass
            # A client reads before it asks again.
            await asyncio.sleep(draws.uniform(0.1, 0.8))


@asynccontextmanager
async def advised(folder: Path, instance: Path) -> AsyncIterator[None]:
    """Post advice each minute."""
    adviser = await asyncio.create_subprocess_exec(
        *(*BATON, "advise", "--watch", "--instance", instance.name, *SETTINGS),
        env=os.environ | {"XDG_RUNTIME_DIR": str(folder)},
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            adviser.terminate()
        await adviser.wait()


async def take(console: str, instance: Path, folder: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None or not BROWSER.exists():
        raise SystemExit("Chromium or build/clients/browser is absent: install it, `make clients`")
    process = await asyncio.create_subprocess_exec(
        *(str(BROWSER), str(PROGRAM), console, (instance / "admin.key").read_text().strip()),
        *(chromium, str(SHOWN_S), str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    if (await process.stdout.readline()).strip() == b"kill":
        worker = json.loads((instance / "decode-1.status").read_text())
        os.kill(worker["pid"], signal.SIGKILL)
        process.stdin.write(b"now\n")
    await process.communicate()
    if process.returncode:
        raise SystemExit("a picture could not be taken: see above")


async def main(folder: Path) -> None:
    with TemporaryDirectory(prefix="baton-pictures-") as name:
        async with served(Path(name)) as (api, console, instance):
            clients = [asyncio.create_task(ask(api, number)) for number in range(CLIENTS)]
            try:
                # The adviser needs some requests that have ended.
                await asyncio.sleep(20 * slowness())
                async with advised(Path(name), instance):
                    await take(console, instance, folder)
            finally:
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"))
