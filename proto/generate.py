"""Generates the Python code of the wire contract: `python -m baton.proto.generate [FOLDER]`.

Writes `<name>_pb2.py`, `.pyi` and `_pb2_grpc.py` beside the .proto files, or into FOLDER so that
a test can compare. Needs grpcio-tools; nothing else in this folder needs anything.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")


def generate(folder: Path) -> list[Path]:
    """The files written into `folder`. Raises RuntimeError when protoc refuses a file."""
    from grpc_tools import protoc

    sources = [f"baton/proto/{path.name}" for path in sorted(HERE.glob("*.proto"))]
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-Ibaton/proto={HERE}", *outputs, *sources]) != 0:
            raise RuntimeError("protoc failed: its message stands above")
        made = Path(scratch, "baton", "proto")
        found = sorted(path for pattern in GENERATED for path in made.glob(pattern))
        return [Path(shutil.copy(path, folder / path.name)) for path in found]


if __name__ == "__main__":
    for written in generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE):
        print(written)
