"""What the documents name exists: settings, metrics, files, commands and flags, targets, fields;
and what a user may set, count or send is named in one of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Counter, Gauge, Histogram

from baton.deploy.nodes import fleet_metrics
from baton.engine.spec.families import FAMILIES
from baton.planner.control import control_metrics
from baton.router.requests.openai_schema import ChatRequest, CompletionRequest
from baton.runtime import handoff_metrics, metrics
from baton.runtime.config import section_names
from baton.runtime.settings import loading as settings
from tests.support.code_files import tracked_pages
from tests.support.command_parsers import commands, flags_of
from tests.support.metric_values import label_names

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    str(page.relative_to(ROOT)): page.read_text()
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
}
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./-])(?:\w[\w-]*/)*[\w-]+\.(?:py|toml|proto|md)\b")
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
LINK = re.compile(r"\]\((?!https?://)([^)#\s]+)(?:#[^)]*)?\)")
METRICS = [
    value
    for module in (metrics, handoff_metrics, control_metrics, fleet_metrics)
    for value in vars(module).values()
    if isinstance(value, Counter | Gauge | Histogram)
]
PROGRESS_WORDS = 1_100  # two printed pages
CELL_WORDS = 40
RECORD_WORDS = 350  # half a printed page of prose, or a little more with a table

everywhere = pytest.mark.parametrize("page", PAGES)


def words(text: str) -> int:
    """Count what has a letter or a digit, so that the frames of tables do not count."""
    return sum(any(map(str.isalnum, part)) for part in text.split())


def test_there_are_pages_to_look_at() -> None:
    assert len(PAGES) > 8 and all(len(text) > 500 for text in PAGES.values())


@everywhere
def test_settings_that_are_named_exist(page: str) -> None:
    written = re.compile(rf"(?<![/\w-])(?:{'|'.join(section_names())})\.[a-z_]+\b(?!\()")
    named = set(written.findall(PAGES[page])) - {"security.md", "handoff.proto", "worker.proto"}
    assert named - set(settings.names()) == set()


@everywhere
def test_files_that_are_named_exist(page: str) -> None:
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    ends = {path.split("/", n)[-1] for path in tracked for n in range(path.count("/") + 1)}
    named = {name for name in FILE.findall(PAGES[page]) if not name.startswith("results/")}
    named.discard("baton.proto")  # a module
    assert named - ends == set()


@everywhere
def test_links_lead_to_files(page: str) -> None:
    folder = (ROOT / page).parent
    assert [link for link in LINK.findall(PAGES[page]) if not (folder / link).exists()] == []


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_decision_record_is_half_a_page_under_four_headings(record: Path) -> None:
    lines = record.read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert re.fullmatch(rf"# {record.name[:4]} .{{8,90}}", headings[0])
    assert headings[1:] == [
        "## Context",
        "## Decision",
        "## Consequences",
        "## What would change it",
    ]
    assert len(lines) <= 45 and max(len(line) for line in lines) <= 160
    assert words(record.read_text()) <= RECORD_WORDS


def test_decision_records_have_unique_numbers_and_an_index() -> None:
    numbers = [record.name[:4] for record in RECORDS]
    assert len(numbers) > 50 and len(set(numbers)) == len(numbers)
    index = PAGES["docs/decisions/README.md"]
    titles = [record.read_text().partition("\n")[0].removeprefix("# ") for record in RECORDS]
    rows = [
        f"- [{title[:4]}]({record.name}) {title[5:]}"
        for record, title in zip(RECORDS, titles, strict=True)
    ]
    assert [row for row in rows if row not in index.splitlines()] == []
    assert sorted(LINK.findall(index)) == sorted(record.name for record in RECORDS)


def test_glossary_defines_each_word_once() -> None:
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", PAGES["docs/glossary.md"], re.MULTILINE)
    words = [word for row in rows if row not in ("word", "---") for word in row.split(", ")]
    assert len(words) > 60
    assert [word for word in words if words.count(word) > 1] == []


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("README.md", r"^Baton serves (Llama.+?), in bf16,"),
        ("docs/progress.md", r"^\| (Llama.+) as transformers computes them \|"),
    ],
)
def test_pages_list_the_model_families_that_are_served(page: str, sentence: str) -> None:
    """ "Gemma 2 and 3 (text)" are gemma2 and gemma3; Phi-4 has the architecture of Phi-3."""
    found = re.search(sentence, PAGES[page], re.MULTILINE | re.DOTALL)
    assert found
    names: list[str] = []
    for name in re.split(r",\s|\s?\band\s", found[1].replace(" (text)", "")):
        plain = re.sub(r"[\s-]", "", name).lower()
        if number := re.fullmatch(r"v?(\d)", plain):  # of the model before
            plain = names[-1].rstrip("0123456789") + number[1]
        names.append(plain)
    assert set(names) - {"phi4"} == {f.name.replace("_", "") for f in FAMILIES.values()}


@pytest.mark.parametrize("page", tracked_pages())
def test_a_cell_of_a_table_holds_a_phrase(page: str) -> None:
    lines = (ROOT / page).read_text().splitlines()
    rows = [line for line in lines if line.lstrip().startswith("|")]
    cells = [cell for line in rows for cell in re.split(r"(?<!\\)\|", line)]
    assert [cell for cell in cells if words(cell) > CELL_WORDS] == []


def test_pages_are_those_that_git_tracks_and_still_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    for name in ("README.md", "build/made.md", "docs/page.md", "docs/deleted.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert tracked_pages.__wrapped__(tmp_path) == ("README.md", "docs/deleted.md", "docs/page.md")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "README.md", "docs"], cwd=tmp_path, check=True)
    (tmp_path / "docs" / "deleted.md").unlink()
    assert tracked_pages.__wrapped__(tmp_path) == ("README.md", "docs/page.md")


def test_progress_has_at_most_two_pages() -> None:
    assert words(PAGES["docs/progress.md"]) <= PROGRESS_WORDS


def test_objects_of_a_request_are_classes_of_the_router() -> None:
    section = PAGES["docs/architecture.md"].partition("### The objects of one request")[2]
    section = section.partition("`runtime/errors.py`")[0]
    four = re.findall(r"^\| `(\w+)` \(`([\w/]+\.py)`\)", section, re.MULTILINE)
    assert len(four) == 4
    assert [name for name, file in four if f"class {name}" not in (ROOT / file).read_text()] == []
    code = "".join(path.read_text() for path in (ROOT / "router").rglob("*.py"))
    named = {name for name in SPAN.findall(section) if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", name)}
    assert [name for name in named if f"class {name}" not in code] == []


@everywhere
def test_targets_that_are_named_exist(page: str) -> None:
    there = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make (?:\w+=\S+ )*([a-z]+)", PAGES[page])
    assert set(named) - there == set()


def orders(text: str) -> Iterator[tuple[str, list[str]]]:
    """Commands of ours in code, and the flags that they are given."""
    for line in (*SPAN.findall(text), *text.splitlines()):
        if found := re.match(r"(?:\.venv/bin/)?baton ([a-z]+)(?![\w.])(.*)", line):
            yield found[1], re.findall(r"(?<!\w)--[a-z-]+", found[2].partition("#")[0])


@everywhere
def test_commands_and_flags_that_are_named_exist(page: str) -> None:
    known = commands()
    wrong = [
        (name, flag)
        for name, flags in orders(PAGES[page])
        for flag in flags or [""]
        if name not in known or (flag and flag not in flags_of(known[name]))
    ]
    assert wrong == []


def test_each_command_is_in_the_readme() -> None:
    reported = {name for name, _ in orders(PAGES["README.md"])}
    assert set(commands()) - reported == set()


def row(metric: Counter | Gauge | Histogram) -> str:
    (family,) = metric.collect()
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = []
    for label in label_names(metric):
        values = dict.fromkeys(sample.labels[label] for sample in family.samples)
        labels.append(f"`{label}`" + (f": {', '.join(values)}" if values else ""))
    return f"| `{name}` | {family.type} | {'; '.join(labels)} | {family.documentation} |"


def test_each_metric_has_its_row_and_no_other_is_named() -> None:
    table = PAGES["docs/metrics.md"]
    expected = {row(metric) for metric in METRICS}
    found = {line for line in table.splitlines() if line.startswith("| `baton_")}
    assert expected - found == set() and found - expected == set()
    names = {line.split("`")[1] for line in found}
    for page, text in PAGES.items():
        named = set(re.findall(r"`(baton_[a-z_]+)`", text))
        assert named - names == set(), page


def test_each_field_of_a_request_is_named_and_no_other() -> None:
    reported = PAGES["docs/api.md"].partition("## Fields of both")[2].partition("Other fields")[0]
    named = {
        name.partition(".")[0] for name in SPAN.findall(reported) if re.match(r"[a-z_.]+$", name)
    }
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert named - {"router"} == fields


def test_reasons_of_red_processes_are_those_of_the_code() -> None:
    """The first cells of both tables of reasons in operations.md."""
    sources = "".join(
        path.read_text()
        for folder in ("deploy/processes", "router", "engine/scheduling", "kv_transfer")
        for path in (ROOT / folder).rglob("*.py")
    )
    lines = PAGES["docs/operations.md"].splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("| reason in the body")]
    reasons = []
    for head in heads:
        row = head + 2
        while lines[row].startswith("|"):
            reasons.append(lines[row].split("|")[1].strip())
            row += 1
    assert len(heads) == 2 and len(reasons) > 10
    assert [reason for reason in reasons if reason not in sources] == []
