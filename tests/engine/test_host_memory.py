from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.memory.host_memory import available_bytes, resident_bytes


def write(path, text):
    path.write_text(text)
    return path


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    return write(tmp_path / "meminfo", "MemTotal: 9000 kB\nMemAvailable:   5000 kB\nHuge: 1\n")


def test_available_is_what_the_kernel_says(meminfo: Path, tmp_path: Path) -> None:
    assert available_bytes(meminfo, tmp_path, tmp_path / "none") == 5000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        ("max", "5", 5000 * 1024),
        ("3000000", "1000000", 2000000),
        ("100", "200", 0),
        ("999999999999", "0", 5000 * 1024),
    ],
)
def test_a_container_has_its_own_limit(
    meminfo: Path, tmp_path: Path, limit: str, used: str, expected: int
) -> None:
    write(tmp_path / "memory.max", f"{limit}\n")
    write(tmp_path / "memory.current", f"{used}\n")
    assert available_bytes(meminfo, tmp_path, tmp_path / "none") == expected


def test_without_the_kernels_figures_all_memory_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", tmp_path, tmp_path / "none") > 1 << 20


def group(folder, limit, used, stat=""):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", stat)


def test_pages_of_files_are_available(meminfo: Path, tmp_path: Path) -> None:
    """A model's files that were just read are no reason to refuse its pool."""
    stat = "anon 500000\nfile 2400000\nactive_file 300000\ninactive_file 2000000\nshmem 100000\n"
    group(tmp_path, 3000000, 2900000, stat)
    assert available_bytes(meminfo, tmp_path, tmp_path / "none") == 3000000 - 600000


def test_every_group_around_the_process_has_its_limit(meminfo: Path, tmp_path: Path) -> None:
    own = write(tmp_path / "own", "1:cpu:/elsewhere\n0::/outer/inner\n")
    root = tmp_path / "groups"
    group(root / "outer", 2000000, 500000)
    group(root / "outer" / "inner", "max", 400000)
    assert available_bytes(meminfo, root, own) == 1500000
    group(root / "outer" / "inner", 1000000, 400000)
    assert available_bytes(meminfo, root, own) == 600000
    (tmp_path / "memory.max").write_text("1")  # not of a group: above the root
    (tmp_path / "memory.current").write_text("1")
    assert available_bytes(meminfo, root, own) == 600000


def test_a_container_that_does_not_see_its_hosts_groups(meminfo: Path, tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/known/to/the/host\n")
    root = tmp_path / "groups"
    group(root, 900000, 100000)
    assert available_bytes(meminfo, root, own) == 800000


def test_a_process_knows_what_it_holds_without_mapped_files(tmp_path: Path) -> None:
    status = write(
        tmp_path / "status", "VmHWM: 99 kB\nRssAnon:\t 7 kB\nRssFile: 50 kB\nRssShmem: 2 kB\n"
    )
    assert resident_bytes(status) == 9 * 1024
    assert resident_bytes(tmp_path / "none") == 0
