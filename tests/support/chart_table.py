"""The table of values in the chart's README.md, from values.schema.json and values.yaml.

`make chart` writes it (`python -m tests.support.chart_table`); a test compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import yaml

from tests.support.chart import FOLDER, Document
from tests.support.json_values import Json

README = FOLDER / "README.md"
HEAD = "| value | default | meaning |\n| --- | --- | --- |\n"


def properties(schema: Document, path: str = "") -> Iterator[tuple[str, Document]]:
    """Return each value of a schema, the outer ones first."""
    for name, inner in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, inner
        yield from properties(inner, here)


def table() -> str:
    """Return one row for each value that holds no others."""
    schema = json.loads((FOLDER / "values.schema.json").read_text())
    defaults = yaml.safe_load((FOLDER / "values.yaml").read_text())
    rows = []
    for path, inner in properties(schema):
        if "properties" in inner or path == "global":
            continue
        value: Json = defaults
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        default = "" if value is None else f"`{json.dumps(value)}`"
        rows.append(f"| `{path}` | {default} | {inner['description']} |\n")
    return HEAD + "".join(rows)


def renewed(text: str) -> str:
    """Return the README with the table as it must be. Raises ValueError where it has none."""
    made, count = re.subn(rf"{re.escape(HEAD)}(\|.*\n)*", lambda _: table(), text)
    if count != 1:
        raise ValueError(f"{README} has {count} tables of values")
    return made


if __name__ == "__main__":
    README.write_text(renewed(README.read_text()))
    print(README)
