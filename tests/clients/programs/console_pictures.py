"""Takes the pictures of docs/console.md in headless Chromium.

    console_pictures.py URL KEY CHROMIUM SECONDS FOLDER

Prints "kill" and waits for a line on stdin before the picture of a lost worker. Runs in the
environment of build/clients/browser.
"""

from __future__ import annotations

import sys
from pathlib import Path

from console_page import LIMIT_MS, opened
from playwright.sync_api import Page, expect, sync_playwright

SIZE = {"width": 1320, "height": 1000}
SETTLED_MS = 2500  # charts and tables have the seconds before


def main() -> None:
    url, key, chromium, _, folder = sys.argv[1:]
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page, problems = opened(browser, url, key, color_scheme="dark")
        page.set_viewport_size(SIZE)
        page.locator("#advice-findings li").first.wait_for(timeout=4 * LIMIT_MS)
        shoot(page, "overview", Path(folder) / "console-advice.png")
        page.emulate_media(color_scheme="light")
        requests(page)
        shoot(page, "requests", Path(folder) / "console-requests.png")
        playground(page)
        shoot(page, "playground", Path(folder) / "console-playground.png")
        page.emulate_media(color_scheme="dark")
        print("kill", flush=True)
        sys.stdin.readline()
        page.locator(".worker[data-state=lost]").first.wait_for()
        shoot(page, "fleets", Path(folder) / "console-fleets.png")
        browser.close()
    if problems:
        raise SystemExit(f"the page complained: {problems}")


def shoot(page: Page, section: str, file: Path) -> None:
    """Take the part of the page that begins with a section."""
    page.evaluate("(id) => document.getElementById(id).scrollIntoView()", section)
    page.wait_for_timeout(SETTLED_MS)
    page.screenshot(path=file)


def requests(page: Page) -> None:
    """Choose a request whose KV was read from a prefill worker."""
    page.locator("#request-hold").click()
    for button in page.locator("#request-body button").all():
        button.click()
        if "fetch" in page.locator("#waterfall-view").inner_text():
            return
    raise SystemExit("no request on the page has read KV from a prefill worker")


def playground(page: Page) -> None:
    page.locator("#play-send").click()
    expect(page.locator("#play-status")).to_contain_text("ended by")
    page.locator("#play-tokens-list").focus()
    for _ in range(12):
        page.keyboard.press("ArrowRight")


main()
