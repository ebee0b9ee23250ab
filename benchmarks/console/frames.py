"""A page of the console in headless Chromium, which counts its frames.

    frames.py URL KEY CHROMIUM

Runs in the environment of build/clients/browser. For each line on stdin, which says for how many
seconds, it opens a page, prints one line of JSON with what it counted, and closes the page.
"""

from __future__ import annotations

import json
import sys

from playwright.sync_api import Page, sync_playwright

READY_MS = 60_000
COUNT = """(seconds) => new Promise((resolve) => {
  const times = [];
  const frame = (now) => {
    times.push(now);
    if (now - times[0] < 1000 * seconds) requestAnimationFrame(frame);
    else resolve(times);
  };
  requestAnimationFrame(frame);
})"""


def counted(page: Page, seconds: float) -> dict[str, float]:
    """Return frames a second, and the longest time between two frames in milliseconds."""
    times = page.evaluate(COUNT, seconds)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return {
        "frames_per_s": 1000 * len(gaps) / (times[-1] - times[0]),
        "longest_ms": max(gaps),
        "workers": page.locator(".worker").count(),
        "requests": page.locator("#request-body tr").count(),
    }


def main() -> None:
    url, key, chromium = sys.argv[1:]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        for line in sys.stdin:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(url)
            page.get_by_label("Key", exact=True).fill(key)
            page.keyboard.press("Enter")
            page.locator("#request-body tr").first.wait_for(timeout=READY_MS)
            print(json.dumps(counted(page, float(line))), flush=True)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
