"""Nothing here runs what it reads: no pickle, no eval, no shell; over the syntax trees of all code.

It finds what is written down: names through imports, aliases and plain assignments, and the few
dangerous arguments. It stops mistakes and habits. A change that builds such a name from parts to
get around it is found by its reader, not here.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest

from tests.support.code_files import ROOT, all_code

# Modules and functions that run what they read, or hand text to a shell. A name covers what lies
# below it; it counts wherever it is mentioned, called or not.
RUNS_WHAT_IT_READS = {
    "pickle", "_pickle", "pickletools", "cloudpickle", "ray.cloudpickle", "dill", "jsonpickle",
    "joblib", "marshal", "shelve", "copyreg", "multiprocessing", "torch.multiprocessing",
    "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process",
    "pandas.read_pickle", "pandas.read_hdf", "pandas.eval", "pandas.io.pickle",
    "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "code", "codeop", "runpy", "imp", "zipimport", "pdb", "timeit", "pkgutil.resolve_name",
    "pydoc", "importlib.import_module", "importlib.__import__", "importlib.machinery",
    "torch.load", "torch.serialization", "torch.storage", "torch.jit.load", "torch.export.load",
    "torch.hub", "torch.package", "torch.utils.model_zoo", "torch.utils.cpp_extension",
    "torch.distributed.rpc", "torch.distributed.checkpoint",
    "torch.distributed.broadcast_object_list", "torch.distributed.all_gather_object",
    "torch.distributed.gather_object", "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list", "torch.distributed.recv_object_list",
    "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput",
    "asyncio.create_subprocess_shell", "logging.config",
}  # fmt: skip
ON_ANYTHING = {"exec_module", "load_module", "read_pickle", "subprocess_shell", "unsafe_load"}
BUILTINS = {"eval", "exec", "compile", "__import__", "__builtins__"}
IMPORTS_BY_NAME = "importlib.import_module"  # with a constant it is that import, and judged as one
SAFE_YAML = {"yaml.SafeLoader", "yaml.CSafeLoader", "yaml.BaseLoader"}
RISKY = ("shell", "allow_pickle", "trust_remote_code")
# Where a risky argument stands when it is given without its name, counted from 0.
PLACE = {"numpy.load": 2, "numpy.lib.format.read_array": 1, "numpy.lib.npyio.NpzFile": 2} | {
    f"subprocess.{name}": 8 for name in ("Popen", "run", "call", "check_call", "check_output")
}
# (file, name): the reason why it may stand there
ALLOWED: dict[tuple[str, str], str] = {
    (
        "kv_transfer/nixl_library.py",
        IMPORTS_BY_NAME,
    ): "the first installed one of constants",
    ("engine/cpu/compiled.py", IMPORTS_BY_NAME): "whether each of two constants can be imported",
    ("tests/engine/conftest.py", "exec_module"): "runs files beside it, named by tests beside it",
    ("tests/engine/parity.py", IMPORTS_BY_NAME): "one of a constant list of files beside it",
}


class _Names:
    """What the names of one file may stand for, whichever scope they are in."""

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self._full: dict[str, set[str]] = {}
        for node in nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    self._add(alias.asname or first, {alias.name if alias.asname else first})
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    self._add(alias.asname or alias.name, {f"{node.module}.{alias.name}"})
        assigned = [node for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
        for node in sorted(assigned, key=lambda node: node.lineno):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name) and node.value is not None:
                    self._add(target.id, self.of(node.value))

    def _add(self, name: str, meanings: set[str]) -> None:
        self._full.setdefault(name, set()).update(meanings)

    def of(self, node: ast.expr) -> set[str]:
        """Full dotted names; none for what no import leads to."""
        if isinstance(node, ast.Name):
            return self._full.get(node.id, {f"builtins.{node.id}"} & BUILTIN_NAMES)
        if isinstance(node, ast.Attribute):
            return {f"{name}.{node.attr}" for name in self.of(node.value)}
        if isinstance(node, ast.Subscript) and "sys.modules" in self.of(node.value):
            return _constant(node.slice)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
            owners, attribute = self.of(node.args[0]), _constant(node.args[1])
            return {f"{owner}.{name}" for owner in owners for name in attribute}
        if isinstance(node, ast.Call) and node.args and IMPORTS_BY_NAME in self.of(node.func):
            return _constant(node.args[0])
        return set()


BUILTIN_NAMES = {f"builtins.{name}" for name in BUILTINS}


def _constant(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def dangers(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """What of RUNS_WHAT_IT_READS a file names, and calls that are dangerous by an argument."""
    nodes = list(ast.walk(tree))
    names = _Names(nodes)
    judged = {  # the callee of an import by a constant name
        node.func
        for node in nodes
        if isinstance(node, ast.Call) and node.args and _constant(node.args[0])
        if names.of(node.func) == {IMPORTS_BY_NAME}
    }
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imported(node)
        elif isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            if node not in judged:
                yield from ((name, node.lineno) for name in names.of(node) if _runs(name))
            if isinstance(node, ast.Attribute) and node.attr in ON_ANYTHING:
                yield node.attr, node.lineno
            if isinstance(node, ast.Name) and node.id in BUILTINS:
                yield f"builtins.{node.id}", node.lineno
            if isinstance(node, ast.Call):
                yield from ((name, node.lineno) for name in _called(node, names))


def _runs(name: str) -> bool:
    return any(above in RUNS_WHAT_IT_READS for above in accumulate(name.split("."), "{}.{}".format))


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, int]]:
    for alias in node.names:
        name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        if alias.name == "*" or (_runs(name) and name != IMPORTS_BY_NAME):
            yield name, node.lineno


def _called(node: ast.Call, names: _Names) -> Iterator[str]:
    given = {argument.arg: argument.value for argument in node.keywords}
    called = names.of(node.func)
    indices = {index for name, index in PLACE.items() if name in called}
    risky = [given[name] for name in RISKY if name in given]
    risky += [node.args[index] for index in indices if index < len(node.args)]
    if any(not (isinstance(value, ast.Constant) and not value.value) for value in risky):
        yield f"{ast.unparse(node.func)}({'|'.join(RISKY)})"
    if called & {"yaml.load", "yaml.load_all"}:
        loader = given.get("Loader") or (node.args[1] if len(node.args) > 1 else None)
        if loader is None or not names.of(loader) or names.of(loader) - SAFE_YAML:
            yield "yaml.load"


def test_nothing_runs_what_it_reads() -> None:
    files = all_code()
    folders = {path.relative_to(ROOT).parts[0] for path in files}
    assert {"router", "tests", "benchmarks", "chaos"} <= folders
    found = {
        (str(path.relative_to(ROOT)), name, line)
        for path in files
        for name, line in dangers(ast.parse(path.read_text()))
    }
    assert {each for each in found if each[:2] not in ALLOWED} == set()
    lines = Counter((path, name) for path, name, _ in found)
    assert lines == dict.fromkeys(ALLOWED, 1), "no longer needed, or not that line alone"


@pytest.mark.parametrize(
    "sample",
    [
        "import pickle", "from pickle import loads", "import cloudpickle as c", "import dill",
        "from marshal import load", "import shelve", "from ray import cloudpickle",
        "def late():\n    import pickle", "from multiprocessing.connection import Listener",
        "import multiprocessing.shared_memory", "eval('1')", "run = exec", "import joblib",
        "compile('1', '', 'exec')", "import runpy\nrunpy.run_path(path)",
        "import torch\ntorch.load('x')", "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load", "import torch\nread = torch.load",
        "import torch\ntorch.serialization.load('x')", "from torch.serialization import load",
        "from torch import serialization as s", "import torch\nt = torch\nt.load('x')",
        "import torch\nt: object = torch\nt.load('x')",
        "import torch\ngetattr(torch, 'load')('x')", "import torch as t\nread = getattr(t, 'load')",
        "import torch\ngetattr(torch, 'jit').load('x')", "import torch\ngetattr(torch, 'hub', 0)",
        "import torch.distributed as d\nd.broadcast_object_list([])",
        "from torch.utils import cpp_extension",
        "import pandas\npandas.read_pickle('x')", "pd.read_pickle('x')",
        "from pandas import read_pickle",
        "from torch import *", "from os.path import *",
        "import importlib\nimportlib.import_module(name)", "from importlib import *",
        "from importlib import import_module as get\nget(name)",
        "import importlib\nimportlib.import_module('pickle')",
        "import importlib\nimportlib.import_module('torch').load('x')",
        "import importlib\nt = importlib.import_module('torch')\nt.load('x')",
        "from importlib import import_module\ngive = import_module",
        "import importlib\nimportlib.import_module(f'{name}')",
        "import importlib\ngetattr(importlib, 'import_module')(name)",
        "__import__('pickle')", "__import__(name)", "__builtins__['eval']",
        "import sys\nsys.modules['pickle'].loads(x)", "spec.loader.exec_module(module)",
        "import yaml\nyaml.load(text)", "from yaml import load\nload(text, Loader=mine)",
        "import yaml\nyaml.load(text, yaml.Loader)", "from yaml import unsafe_load",
        "import numpy as np\nnp.load('x', allow_pickle=True)", "numpy.load('x', allow_pickle=flag)",
        "import numpy as np\nnp.load('x', None, True)", "from numpy import load\nload(x, 0, flag)",
        "import subprocess\nsubprocess.run('x', shell=True)", "import os\nos.system('x')",
        "import subprocess as s\ns.Popen('x', -1, None, None, None, None, None, True, True)",
        "from asyncio import create_subprocess_shell", "AutoModel.of('x', trust_remote_code=True)",
        "loop.subprocess_shell(make, 'x')", "from logging.config import fileConfig",
        "import builtins\nbuiltins.exec('x')", "import builtins\ngetattr(builtins, 'exec')('x')",
    ],
)  # fmt: skip
def test_each_way_to_run_what_is_read_is_found(sample: str) -> None:
    assert list(dangers(ast.parse(sample)))


def test_each_name_of_the_list_is_found_imported_and_used() -> None:
    for name in sorted(RUNS_WHAT_IT_READS - {IMPORTS_BY_NAME}):
        root, _, rest = name.partition(".")
        owner, _, leaf = name.rpartition(".")
        samples = [f"from {owner} import {leaf} as x", f"import {root} as x\nx.{rest}"]
        for sample in samples if rest else [f"import {name} as x", f"from {name} import x"]:
            assert list(dangers(ast.parse(sample))), sample


@pytest.mark.parametrize(
    "sample",
    [
        "model.eval()", "import re\nre.compile('x')", "import yaml\nyaml.safe_load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)", "import torch\ntorch.compile(f)",
        "import numpy as np\nnp.load('x')", "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import numpy as np\nnp.load('x', 'r', False)", "import torch\ngetattr(torch, 'float32')",
        "import torch\ngetattr(torch, name)", "getattr(runner, 'load')", "code = message.code",
        "import importlib\nimportlib.import_module('numba.core.event').register(x)",
        "from importlib import import_module\nknobs = import_module('triton').knobs",
        "import importlib.util\nimportlib.util.find_spec('torch')",
        "import importlib.metadata as m\nm.version('torch')", "import sys\nsys.modules['torch']",
        "import subprocess\nsubprocess.run(['x'], shell=False)", "loads(b'{}')", "self.load(x)",
        "code.name",
    ],
)  # fmt: skip
def test_what_only_looks_like_it_is_let_through(sample: str) -> None:
    assert list(dangers(ast.parse(sample))) == []
