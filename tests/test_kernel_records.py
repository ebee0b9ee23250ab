"""Each kernel of a CPU has a decision record that states its gain, or that none was measured."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = {path.name: path.read_text() for path in (ROOT / "docs/decisions").glob("0*.md")}
# They compile, cache and choose kernels, and have none.
NO_KERNELS = {"compiled", "kernel_cache", "linear", "linear_quantized"}
KERNELS = sorted(
    path.relative_to(ROOT)
    for folder in ("engine/cpu", "engine/cpu_draws")
    for path in (ROOT / folder).glob("*.py")
    if path.stem not in NO_KERNELS
) + [Path("kv_transfer/checksum_numba.py")]
PROCESSORS = ("AVX2", "AVX-512", "AMX")
FIGURES = ("| measured gain over torch", "not measured", "no figure")  # or that there is none


def records_of(kernel: Path) -> list[str]:
    """Names of the records that name its file and speak of each kind of processor."""
    named = re.compile(rf"(?<!\w){kernel.stem}\.py")
    return [
        name
        for name, text in RECORDS.items()
        if named.search(text) and all(kind in text for kind in PROCESSORS)
    ]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.stem)
def test_each_kernel_has_a_record_of_its_gain(kernel: Path) -> None:
    """Of its gain on each kind of processor, or that it was not measured."""
    found = records_of(kernel)
    assert found, f"no record of docs/decisions names {kernel} and the kinds of processors"
    assert any(words in RECORDS[name] for words in FIGURES for name in found)


def test_modules_without_kernels_compile_none() -> None:
    for stem in NO_KERNELS:
        text = (ROOT / f"engine/cpu/{stem}.py").read_text()
        assert "@compiled" not in text and "@inner" not in text and "@emitted" not in text
    assert len(KERNELS) > 20


def test_a_kernel_without_a_record_is_noticed() -> None:
    assert records_of(Path("engine/cpu/attention_new.py")) == []
    assert records_of(Path("engine/cpu/tion_bf16.py")) == []  # the end of another's name
