"""`helm` on PATH renders the chart, and a cluster that `kubectl` reaches accepts its objects."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import helm_python
import pytest

from tests.support.chart import FOLDER, FOREIGN, Document, Release, example, render
from tests.support.chart_choices import EXAMPLES
from tests.support.chart_programs import dry_run, reaches_cluster

HELM = '''#!{python}
"""`helm template` by Helm's library: documents by kind, as Helm prints them; it notes each call."""
import json, re, sys
import helm_python

with open({calls!r}, "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
name, folder, namespace = sys.argv[2], sys.argv[3], sys.argv[5]
try:
    files = helm_python.Chart.load(folder).render(
        json.load(sys.stdin), name=name, namespace=namespace
    )
except helm_python.HelmError as error:
    sys.exit(f"Error: {{error}}")
documents = [
    (found[1], path, each)
    for path, text in sorted(files.items())
    for each in re.split("^---$", text, flags=re.MULTILINE)
    if (found := re.search(r"^kind: (\\w+)$", each, re.MULTILINE))
]
for _, path, each in sorted(documents, key=lambda document: document[0]):
    print("---", "# Source: " + path, each.strip(), sep="\\n")
'''
KUBECTL = """#!/bin/sh
echo "$@" >> {calls}
/bin/cat > {given}
echo 'error: unknown field "spec.x"' >&2
exit {code}
"""


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def by_kind(release: Release) -> dict[str, list[Document]]:
    return {each["kind"]: release.of_kind(each["kind"]) for each in release.documents}


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_on_path_renders_what_its_library_does(path: Path, name: str) -> None:
    by_library = render(example(name), name="own", namespace="there")
    calls = path / "calls"
    program(path / "helm", HELM.format(python=sys.executable, calls=str(calls)))
    by_program = render(example(name), name="own", namespace="there")
    given = ["template", "own", str(FOLDER), "--namespace", "there", "--values", "-"]
    assert [json.loads(line) for line in calls.read_text().splitlines()] == [given]
    assert by_kind(by_program) == by_kind(by_library) and len(by_library.documents) > 10
    assert by_program.notes == by_library.notes != ""


def test_documents_are_those_that_helm_prints(path: Path) -> None:
    line = r"---\n# Source: baton/templates/{0}.yaml\nkind: {1}\n"
    printed = line.format("b", "Late") + line.format("a", "Early") + line.format("b", "Last")
    program(path / "helm", f"#!/bin/sh\n/bin/cat > /dev/null\nprintf %b '{printed}'\n")
    kinds = [each["kind"] for each in render(example("cpu-demo")).documents]
    assert kinds == ["Early", "Late", "Last"]


def test_words_of_helm_are_those_of_the_error(path: Path) -> None:
    program(path / "helm", HELM.format(python=sys.executable, calls=str(path / "calls")))
    with pytest.raises(helm_python.HelmError, match=r"^Error: .*model: 0 of model\.embedded"):
        render({})


@pytest.fixture(scope="module")
def kubectl() -> str:
    """The program, where it reaches a cluster: the schemas are that cluster's."""
    found = shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is not installed here, so no cluster can be asked")
    if not reaches_cluster(found):
        pytest.skip("kubectl reaches no cluster here")
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_cluster_accepts_each_object_of_kubernetes(kubectl: str, name: str) -> None:
    documents = render(example(name)).documents
    dry_run(kubectl, [each for each in documents if each["kind"] not in FOREIGN])


@pytest.mark.parametrize(("code", "reached"), [(0, True), (1, False)])
def test_a_cluster_is_asked_and_changes_nothing(tmp_path: Path, code: int, reached: bool) -> None:
    calls, given = tmp_path / "calls", tmp_path / "given"
    text = KUBECTL.format(calls=calls, given=given, code=code)
    kubectl = program(tmp_path / "kubectl", text)
    assert reaches_cluster(kubectl) is reached
    if reached:
        dry_run(kubectl, [{"kind": "Pod"}])
    else:
        with pytest.raises(ValueError, match=r'unknown field "spec\.x"'):
            dry_run(kubectl, [{"kind": "Pod"}])
    assert json.loads(given.read_text())["items"] == [{"kind": "Pod"}]
    asked, applied = calls.read_text().splitlines()
    assert asked.startswith("version") and "apply --dry-run=client --validate" in applied
