"""Drives the console in headless Chromium, and prints what it saw as one JSON object.

console_page.py URL KEY CHROMIUM SECONDS PART, which is one of PARTS

What is waited for comes within SECONDS, or the program fails.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

AXE = Path(axe_playwright_python.__path__[0]) / "axe.min.js"
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
THEMES = ("light", "dark")
LIMIT_MS = 1000 * float(sys.argv[4])


def blank(browser: Browser, **options: Any) -> Page:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(LIMIT_MS)
    return page


def opened(browser: Browser, url: str, key: str, **options: Any) -> tuple[Page, list[str]]:
    """The console behind its key, and what the browser complains of."""
    page = blank(browser, viewport={"width": 1280, "height": 900}, **options)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "console",
        lambda said: problems.append(said.text) if said.type in ("error", "warning") else None,
    )
    page.on(
        "request",
        lambda sent: (
            problems.append(f"request to {sent.url}")
            if key in sent.url or not sent.url.startswith(url)
            else None
        ),
    )
    page.goto(url)
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#connection")).to_have_text("live")
    return page, problems


def panels(browser: Browser, url: str, key: str) -> dict[str, Any]:
    page = blank(browser)
    page.goto(url)
    page.get_by_label("Key", exact=True).fill("a-wröng-key")  # no header can have it
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_contain_text("ASCII only")
    page.get_by_label("Key", exact=True).fill("a-wrong-key")
    page.keyboard.press("Enter")
    expect(page.locator("#key-error")).to_have_text("This key is not accepted.")
    page.close()

    page, problems = opened(browser, url, key)
    page.locator("#request-body button").first.wait_for()
    page.locator("#request-body button").first.focus()
    page.keyboard.press("Enter")
    page.locator("table.waterfall tbody tr").first.wait_for()
    page.locator("#fleet-details summary").focus()
    page.keyboard.press("Enter")
    rows = page.locator("#fleet-body tr")
    expect(rows).not_to_have_count(0)
    page.locator("#request-filter").select_option("active")
    page.locator("#request-body tr").first.wait_for()
    active = page.locator("#request-body tr").first.inner_text()
    handoff = page.locator("#handoff-body tr").first.inner_text()
    page.locator("#prefix-body .chip").first.wait_for()
    page.locator("#advice summary").focus()
    page.keyboard.press("Enter")
    changes = page.locator("#advice-body tr").first.inner_text()
    seen = {
        "tiles": page.locator("#tiles dd").all_inner_texts(),
        "charts": [chart.get_attribute("aria-label") for chart in page.locator(".chart svg").all()],
        "lines": [bool(line.get_attribute("d")) for line in page.locator(".line").all()],
        "maps": [each.get_attribute("aria-label") for each in page.locator("canvas.map").all()],
        "workers": rows.count(),
        "phases": page.locator("table.waterfall tbody th").all_inner_texts(),
        "active": active,
        "handoff": handoff,
        "placements": page.locator("#placements").inner_text(),
        "prefixes": [prefix_row(row) for row in page.locator("#prefix-body tr").all()],
        "ratios": page.locator("#advice-ratios .ratio").all_inner_texts(),
        "findings": page.locator("#advice-findings li").all_inner_texts(),
        "advice": page.locator("#advice-basis").inner_text(),
        "changes": changes,
        "events": page.locator("#event-list li").all_inner_texts(),
        "url": page.url,
        "problems": problems,
    }
    page.locator("#theme").select_option("dark")
    dark = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").select_option("light")
    light = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    page.reload()  # the key stays in the tab
    expect(page.locator("#connection")).to_have_text("live")
    return {**seen, "dark": dark, "light": light}


def prefix_row(row: Locator) -> list[Any]:
    """The name, the blocks and the prompts of a prefix, and the workers that hold it."""
    name, blocks, prompts = [cell.inner_text() for cell in row.locator("th, td").all()[:3]]
    return [name, blocks, prompts, row.locator(".chip").all_inner_texts()]


# The script notes whether the user can stop an answer when the page shows its first token. A
# question from outside the page comes too late: the last token may be shown by then.
STREAMING = """() => {
  const first = new MutationObserver(() => {
    window.whileStreaming = !document.querySelector("#play-stop").disabled;
    first.disconnect();
  });
  first.observe(document.querySelector("#play-tokens-list"), { childList: true });
}"""


def stream(browser: Browser, url: str, key: str) -> dict[str, Any]:
    page, problems = opened(browser, url, key)
    page.locator("#play-prompt").fill("Tell me a story.")
    page.locator("#play-tokens").fill("12")
    page.evaluate(STREAMING)
    page.locator("#play-send").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#play-status")).to_contain_text("ended by length")
    page.locator("#play-tokens-list").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("End")
    chosen = page.locator("#play-tokens-list [aria-selected=true]")
    trace = page.locator("#play-explanation table.waterfall tbody tr")
    trace.first.wait_for()
    found = {
        "while_streaming": page.evaluate("() => window.whileStreaming"),
        "tokens": page.locator("#play-tokens-list [role=option]").count(),
        "bars": page.locator("#play-timeline i").count(),
        "timeline": page.locator("#play-timeline").get_attribute("aria-label"),
        "chosen": chosen.get_attribute("id"),
        "active": page.locator("#play-tokens-list").get_attribute("aria-activedescendant"),
        "detail": page.locator("#play-token p").inner_text(),
        "alternatives": page.locator("#play-token tbody tr").count(),
        "phases": trace.count(),
    }
    page.locator("#play-explain").click()
    page.locator("#play-explanation caption").first.wait_for()
    found["explained"] = page.locator("#play-explanation p").inner_text()
    page.locator("#play-tokens").fill("2000")  # more than are answered before the click
    page.locator("#play-send").click()
    page.locator("#play-tokens-list [role=option]").first.wait_for()
    page.locator("#play-stop").click()
    expect(page.locator("#play-status")).to_have_text("Stopped.")
    return {**found, "problems": problems}


# All that a user can operate now; a closed part of the page and a disabled button are not.
CONTROLS = """() => {
  const all = "a[href], button, input, select, textarea, summary, [tabindex]";
  window.controls = [...document.querySelectorAll(all)].filter(
    (each) => each.tabIndex >= 0 && !each.disabled && each.checkVisibility(),
  );
  return window.controls.length;
}"""
FOCUSED = """() => {
  const node = document.activeElement;
  const name = node.id || node.getAttribute("aria-label") || node.textContent.trim().slice(0, 30);
  const seen = getComputedStyle(node).outlineStyle !== "none";
  return { index: window.controls.indexOf(node), name: `${node.localName} ${name}`, seen };
}"""


def keyboard(browser: Browser, url: str, key: str) -> dict[str, Any]:
    """Walk through the page with Tab, then operate what no other part does with keys."""
    page, problems = opened(browser, url, key)
    page.locator("#request-body button").first.wait_for()
    for summary in page.locator("summary").all():
        summary.focus()
        page.keyboard.press("Enter")
    page.evaluate("() => { document.activeElement.blur(); scrollTo(0, 0); }")
    page.locator(".skip").focus()
    controls, reached = page.evaluate(CONTROLS), []
    while (focused := page.evaluate(FOCUSED))["name"] not in [each["name"] for each in reached]:
        reached.append(focused)
        page.keyboard.press("Tab")
    page.locator("#theme").focus()
    page.keyboard.type("Dark")
    page.locator("#request-filter").focus()
    page.keyboard.type("active")
    page.locator("#request-hold").focus()
    page.keyboard.press("Space")
    page.locator("#play-explain").focus()
    page.keyboard.press("Enter")
    page.locator("#play-explanation caption").first.wait_for()
    page.locator("#play-tokens").fill("2000")  # more than are answered before the key
    page.locator("#play-send").focus()
    page.keyboard.press("Enter")
    page.locator("#play-tokens-list [role=option]").first.wait_for()
    page.locator("#play-stop").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#play-status")).to_have_text("Stopped.")
    return {
        "controls": list(range(controls)),
        "reached": [each["index"] for each in reached if each["index"] >= 0],
        "invisible": [each["name"] for each in reached if each["index"] >= 0 and not each["seen"]],
        "names": [each["name"] for each in reached],
        "theme": page.locator("html").get_attribute("data-theme"),
        "filter": page.locator("#request-filter").input_value(),
        "held": page.locator("#request-hold").get_attribute("aria-pressed"),
        "problems": problems,
    }


def kill(browser: Browser, url: str, key: str) -> dict[str, Any]:
    """Print "watching", wait for a line on stdin, and time until the page shows a lost worker."""
    page, problems = opened(browser, url, key)
    page.locator(".worker[data-state=ready]").first.wait_for()
    print("watching", flush=True)
    sys.stdin.readline()
    begun_s = time.monotonic()
    page.locator(".worker[data-state=lost], #event-list li.bad").first.wait_for()
    seconds = time.monotonic() - begun_s
    event = page.locator("#event-list li.bad").first.inner_text()
    return {"seconds": seconds, "event": event, "problems": problems}


def axe(browser: Browser, url: str, key: str) -> dict[str, Any]:
    """The violations of each theme, and of the dialog that asks for the key."""
    found: dict[str, Any] = {}
    for theme in THEMES:
        page = blank(browser, bypass_csp=True, color_scheme=theme)
        page.goto(url)
        page.locator("#key-dialog[open]").wait_for()
        found[f"{theme} key"] = violations(page)
        page.close()
        page, _ = opened(browser, url, key, bypass_csp=True, color_scheme=theme)
        page.locator("#request-body button").first.click()
        page.locator("#fleet-details summary").click()
        page.locator("#play-tokens").fill("8")
        page.locator("#play-send").click()
        expect(page.locator("#play-status")).to_contain_text("ended by")
        page.locator("#play-tokens-list").focus()
        found[theme] = violations(page)
    return {"violations": found}


def violations(page: Page) -> list[str]:
    page.add_script_tag(path=AXE)
    result = page.evaluate(
        "(rules) => axe.run(document, {runOnly: {type: 'tag', values: rules}})", RULES
    )
    return [
        f"{each['id']}: {node['html'][:150]} ({node.get('failureSummary', '')[:300]})"
        for each in result["violations"]
        for node in each["nodes"]
    ]


def narrow(browser: Browser, url: str, key: str) -> dict[str, Any]:
    """Whether a narrow window, or large text, makes the page scroll sideways."""
    page, problems = opened(browser, url, key, reduced_motion="reduce")
    page.set_viewport_size({"width": 360, "height": 700})
    page.locator("#request-body button").first.click()
    wide = page.evaluate("() => document.documentElement.scrollWidth - window.innerWidth")
    return {"surplus": wide, "problems": problems}


def warning(browser: Browser, url: str, key: str) -> dict[str, Any]:
    page, problems = opened(browser, url, key)
    page.locator("#warning").wait_for()
    found = {"text": page.locator("#warning").inner_text(), "problems": problems}
    return {**found, "alert": page.locator("#warning [role=alert]").inner_text()}


# As of a hidden page, which draws no frames: the script counts those that are asked for, and each
# message of the stream.
FRAMELESS = """() => {
  window.frames = [];
  window.messages = 0;
  window.requestAnimationFrame = (draw) => window.frames.push(draw);
  const parse = JSON.parse;
  JSON.parse = (text) => { window.messages += 1; return parse(text); };
}"""


def hidden(browser: Browser, url: str, key: str) -> dict[str, Any]:
    page = blank(browser)
    page.add_init_script(f"({FRAMELESS})()")
    page.goto(url)
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")
    frames = []
    for _ in range(2):
        begun_s = time.monotonic()
        while page.evaluate("() => window.messages") < 3:  # `wait_for_function` needs frames
            assert time.monotonic() - begun_s < LIMIT_MS / 1000
            page.wait_for_timeout(100)
        frames.append(page.evaluate("() => window.frames.length"))
        page.evaluate("() => { for (const draw of window.frames.splice(0)) draw(0); }")
        page.evaluate("() => { window.messages = 0; }")
    return {"frames": frames, "model": page.locator("#model").inner_text()}


def refused(browser: Browser, url: str, key: str) -> dict[str, Any]:
    page = blank(browser)
    page.goto(url)
    page.get_by_label("Key", exact=True).fill(key)
    page.keyboard.press("Enter")
    expect(page.locator("#connection")).to_have_attribute("data-state", "lost")
    return {"text": page.locator("#connection").inner_text()}


PARTS: dict[str, Callable[[Browser, str, str], dict[str, Any]]] = {
    "panels": panels, "stream": stream, "keyboard": keyboard, "kill": kill, "axe": axe,
    "narrow": narrow, "warning": warning, "hidden": hidden, "refused": refused,
}  # fmt: skip


def main() -> None:
    url, key, chromium, _, part = sys.argv[1:]
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        print(json.dumps(PARTS[part](browser, url, key)))
        browser.close()


if __name__ == "__main__":
    main()
