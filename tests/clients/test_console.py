"""The console in a real browser: each panel, a stream, a killed worker, accessibility.

The router is a real one over HTTP; its workers are scripted, so that the tests start in a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.router.console import console_feed
from baton.router.console.admin_port import AdminAccess
from baton.router.fleet import recent_prompts
from baton.runtime.identity import chain, cluster_key, root
from tests.router.test_console import ADVICE
from tests.support.json_values import Json, JsonObject
from tests.support.machine_speed import slowness
from tests.support.router_process import FAST_ROUTER, TOKEN, RunningRouter, running_router
from tests.support.waiting import eventually

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / "build" / "clients" / "browser"
MODEL = HERE.parents[1] / "models" / "baton-tiny"
KEY = "the-operators-key-0123456789"
BLOCKS_KEY = cluster_key(TOKEN)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
POOL = {"total": 200, "used": 40, "leased": 6, "pinned": 10, "cached": 60, "quarantined": 1}
PART_TIMEOUT_S = 60 * slowness()
SHOWN_S = 20 * slowness()  # of one thing on a page
KILLED_S = 3 * slowness()  # until a page shows that a worker is lost
ASKED = [{"role": "user", "content": "a story " * 30}]
DARK, LIGHT = "rgb(14, 17, 22)", "rgb(245, 246, 248)"

if CHROMIUM is None:
    pytest.skip("chromium is absent: install Debian's package", allow_module_level=True)
if not (ENVIRONMENT / ".installed").exists():
    pytest.skip("build/clients/browser is absent: run `make clients`", allow_module_level=True)


@asynccontextmanager
async def fleet(**switches: Any) -> AsyncIterator[RunningRouter]:
    """Two decode workers and a prefill worker, after some chats."""
    config = replace(FAST_ROUTER, placement="disaggregated", link_grace_s=10.0)
    async with running_router(
        MODEL,
        workers=("prefill-0", "decode-0", "decode-1"),
        config=config,
        admin=AdminAccess(KEY),
        step_s=0.01,
        pool=POOL | {"free": 83},
        **switches,
    ) as running:
        for _ in range(3):
            await running.chat(messages=ASKED, max_tokens=4)
        assert running.admin is not None
        assert (await running.admin.post("/console/advice", json=ADVICE)).status_code == 204
        yield running


async def hold_prefixes(running: RunningRouter) -> list[list[Json]]:
    """Ask for a prompt that begins like the chats', make the prefill worker hold all of it and a
    decode worker the part that they share; return blocks, prompts and holders of both parts."""
    longer = [{"role": "user", "content": "a story " * 30 + "about a red fox " * 20}]
    await running.chat(messages=longer, max_tokens=4)
    sent = [submit for worker in running.workers.values() for submit in worker.seen("submit")]
    prompts = sorted((list(submit.prompt) for submit in sent), key=len)
    first, last = (
        chain(BLOCKS_KEY, root(BLOCKS_KEY, "f" * 32, "float32"), prompt, 16)
        for prompt in (prompts[0], prompts[-1])
    )
    shared = len(set(first) & set(last))
    assert 0 < shared < len(last)
    running.workers["prefill-0"].publish(last)
    running.workers["decode-1"].publish(last[:shared])
    return [
        [str(shared), "4", ["decode-1", "prefill-0"]],
        [str(len(last) - shared), "1", ["prefill-0"]],
    ]


async def browse(running: RunningRouter, part: str) -> asyncio.subprocess.Process:
    assert running.admin is not None
    return await browse_at(str(running.admin.base_url).rstrip("/"), KEY, part)


async def browse_at(url: str, key: str, part: str) -> asyncio.subprocess.Process:
    program = HERE / "programs" / "console_page.py"
    return await asyncio.create_subprocess_exec(
        *(str(ENVIRONMENT / "bin" / "python"), str(program), url, key, str(CHROMIUM)),
        *(str(SHOWN_S), part),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def seen(process: asyncio.subprocess.Process) -> JsonObject:
    """What the program saw. The browser ends with the program that started it."""
    async with asyncio.timeout(PART_TIMEOUT_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()[-4000:]
    return dict(json.loads(out.splitlines()[-1]))


async def test_each_panel_shows_what_the_router_knows() -> None:
    async with fleet() as running:
        held = await hold_prefixes(running)
        for worker in running.workers.values():
            worker.pause_at = 0
        waiting = [asyncio.create_task(running.chat(max_tokens=4)) for _ in range(3)]
        await eventually(lambda: len(running.workers["decode-0"].held) > 0)
        found = await seen(await browse(running, "panels"))
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert found["problems"] == [] or all("401" in each for each in found["problems"])
    assert KEY not in found["url"]
    assert found["tiles"][0] == "3 of 3" and all(found["lines"])
    assert all("now" in label for label in found["charts"])
    assert found["workers"] == len(found["maps"]) == 3
    states = "40 used, 6 leased, 10 pinned, 60 cached, 1 quarantined, 83 free"
    assert found["maps"][0] == f"Blocks of prefill-0: {states}"
    assert found["phases"][:2] == ["receive", "parse"] and "write" in found["phases"]
    assert "handoff" in found["active"] and "prefill-0" in found["handoff"]
    assert "prompts to prefill workers" in found["placements"]
    assert [row[1:] for row in found["prefixes"] if row[3]] == held
    assert [each.splitlines() for each in found["ratios"]] == [
        ["Ratio −1", "none", "the only prefill worker stays"],
        ["Ratio now", "12/s (60 %)", "1 prefill, 3 decode"],
        ["Ratio +1", "18/s (90 %)", "2 prefill, 2 decode"],
    ]
    assert found["findings"] == [ADVICE["findings"][0]["text"]]
    assert "40 requests of 60 s" in found["advice"] and "differ by 7 %" in found["advice"]
    assert found["changes"].split("\t")[:3] == ["2 prefill, 2 decode", "90 %", "500 ms"]
    assert any("decode-1" in each and "joined" in each for each in found["events"])
    assert (found["dark"], found["light"]) == (DARK, LIGHT)


async def test_the_playground_streams_tokens_with_logprobs() -> None:
    async with fleet() as running:
        found = await seen(await browse(running, "stream"))
    assert found["problems"] == [] and found["while_streaming"]
    assert found["tokens"] == found["bars"] == 12 and found["phases"] > 5
    assert found["chosen"] == found["active"] == "token-11"
    assert found["timeline"].startswith("12 tokens: the first after")
    assert "with probability" in found["detail"] and found["alternatives"] == 5
    assert "decoded on decode-" in found["explained"]


async def test_each_control_is_reached_with_tab() -> None:
    async with fleet() as running:
        found = await seen(await browse(running, "keyboard"))
    assert found["reached"] == found["controls"], found["names"]
    assert len(found["controls"]) > 25 and found["invisible"] == []
    assert (found["theme"], found["filter"], found["held"]) == ("dark", "active", "true")
    assert found["problems"] == []


async def test_a_killed_worker_is_visible_within_three_seconds() -> None:
    async with fleet() as running:
        process = await browse(running, "kill")
        assert process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(PART_TIMEOUT_S):
            assert (await process.stdout.readline()).strip() == b"watching"
        await running.workers["decode-1"].die()
        process.stdin.write(b"now\n")
        found = await seen(process)
    assert found["seconds"] < KILLED_S and found["problems"] == []
    assert "decode-1 lost its link" in found["event"].replace("\n", " ").replace("  ", " ")


@pytest.mark.nightly
async def test_axe_finds_no_violation_in_either_theme() -> None:
    async with fleet() as running:
        found = await seen(await browse(running, "axe"))
    assert set(found["violations"]) == {"light", "dark", "light key", "dark key"}
    assert all(each == [] for each in found["violations"].values()), found["violations"]


async def test_a_narrow_window_does_not_scroll_sideways() -> None:
    async with fleet() as running:
        found = await seen(await browse(running, "narrow"))
    assert found == {"surplus": 0, "problems": []}


async def test_handoffs_that_all_fail_are_reported() -> None:
    async with fleet(loses_handoffs=True) as running:
        found = await seen(await browse(running, "warning"))
    assert "computed all 3 prompts of the last five minutes (failed: 3)" in found["text"]
    assert "No KV comes from the prefill workers: handoffs fail" in found["alert"]
    assert "3" not in found["alert"]  # it would be read out each time the count changes
    assert found["problems"] == []


async def test_an_early_handoff_does_not_silence_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet() as running:
        monkeypatch.setattr(recent_prompts, "WINDOW_S", 1.0)  # its minutes pass
        monkeypatch.setattr(recent_prompts, "SLOT_S", 0.1)
        for worker in running.workers.values():
            worker.loses_handoffs = True
        process = await browse(running, "warning")
        while process.returncode is None:  # the program ends with the warning, or fails in time
            await running.chat(max_tokens=2)
        found = await seen(process)
    assert "handoffs fail" in found["alert"] and found["problems"] == []


async def test_a_hidden_page_asks_for_one_frame() -> None:
    """A tab in the background kept a thousand draws for when it is shown again."""
    async with fleet() as running:
        found = await seen(await browse(running, "hidden"))
    assert found["frames"] == [1, 1] and found["model"]


async def test_a_refused_page_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_feed, "MAX_VIEWERS", 0)
    async with fleet() as running:
        found = await seen(await browse(running, "refused"))
    assert "0 consoles are open at this router: close one" in found["text"]


@pytest.mark.nightly
@pytest.mark.timeout(240)
async def test_a_real_worker_that_is_killed_is_visible_in_time(tmp_path: Path) -> None:
    """`kill -9` of a decode worker of `baton serve`."""
    serving = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "baton.deploy.cli.main", "serve", "--decode", "2"),
        *("--port", "0", "--launcher", "process"),
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    assert serving.stdout is not None
    try:
        line = ""
        async with asyncio.timeout(150):
            while not line.startswith("Console at "):
                line = (await serving.stdout.readline()).decode()
        url, (folder,) = line.split()[2], (tmp_path / "baton").glob("pid-*")
        process = await browse_at(url, (folder / "admin.key").read_text().strip(), "kill")
        assert process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(PART_TIMEOUT_S):
            assert (await process.stdout.readline()).strip() == b"watching"
        os.kill(json.loads((folder / "decode-1.status").read_text())["pid"], signal.SIGKILL)
        process.stdin.write(b"now\n")
        found = await seen(process)
    finally:
        serving.send_signal(signal.SIGINT)
        await serving.communicate()
    assert found["seconds"] < KILLED_S and "decode-1" in found["event"]
