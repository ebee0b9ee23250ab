"""Names of a release's objects, as the documents write them for a release called RELEASE."""

from __future__ import annotations

import re

from tests.support.chart import FOLDER, ROOT, Release, Values, example, merged, render

PAGES = (*sorted((ROOT / "docs").rglob("*.md")), FOLDER / "README.md")
NAME = re.compile(r"(?<!\w)RELEASE-([a-z]+-[a-z-]*[a-z])(?=\.NAMESPACE\b|(?![\w.-]))")
CODE: Values = {"models": {"code": {"model": {"embedded": True, "name": "code"}}}}
ROLES: Values = {"autoscaling": {"mode": "baton", "baton": {"ttftSeconds": 2}}}
KUBERAY: Values = {"orchestrator": "kuberay"}


def releases(name: str) -> list[Release]:
    return [
        render(merged(example("cpu-demo"), CODE, form), name=name) for form in ({}, ROLES, KUBERAY)
    ]


def names(name: str) -> set[str]:
    """Return the names of all objects, of Secrets that pods mount or that the hook may write (it
    creates them), and those that certificates of workers bear."""
    found = set[str]()
    for release in releases(name):
        found |= {each["metadata"]["name"] for each in release.documents}
        rules = (rule for each in release.documents for rule in each.get("rules") or ())
        found |= {name for each in rules for name in each.get("resourceNames", ())}
        for _, pod in release.pods():
            mounted = (each.get("secret", {}) for each in pod.get("volumes", []))
            found |= {each["secretName"] for each in mounted if "secretName" in each}
            for variable in (each for e in pod["containers"] for each in e.get("env", [])):
                if variable["name"] == "BATON_SECURITY__SERVER_NAME":
                    found.add(variable["value"].partition(".")[0])
    return found


def test_documents_name_objects_that_a_release_has() -> None:
    """The chart's README says how names begin where the release's own contains `baton`: there
    RELEASE-code-router is one."""
    written = {(page.name, each) for page in PAGES for each in NAME.findall(page.read_text())}
    assert {"baton-worker", "baton-ray", "baton-router"} <= {each for _, each in written}
    plain, of_baton = names("chat"), names("my-baton")
    assert "chat-baton-worker" in plain and "my-baton-worker" in of_baton
    wrong = [
        (page, each)
        for page, each in sorted(written)
        if f"chat-{each}" not in plain and (page, each) != ("README.md", "code-router")
    ]
    assert wrong == [] and "my-baton-code-router" in of_baton


def test_descriptions_of_values_name_what_certificates_bear() -> None:
    text = (FOLDER / "values.schema.json").read_text()
    written = set(re.findall(r"RELEASE-([a-z-]+)\.NAMESPACE", text))
    called_by_clients = {"baton-router"}  # of router.tlsSecret, which the chart does not make
    assert written == {"baton-worker", "baton-redis", "baton-ray-redis"} | called_by_clients
    assert {f"chat-{each}" for each in written} <= names("chat")
