"""The chart's images, as this machine stands for them: this checkout, its virtual environment, and
the Redis server that is installed. Kernels that workers compile are kept between pods, and begin
with this user's: in a cluster each pod compiles its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from baton.models.embedded import embedded_model
from tests.support.pods.container import Image, Mount, base_mounts
from tests.support.redis_server import required_client, required_tls_binary

CACHE = "/var/cache/kernels"
QUIET = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "PYTHONDONTWRITEBYTECODE": "1"}


def local_images(folder: Path) -> Callable[[str], Image]:
    """Return the image of each name. Skips the test without a Redis server that speaks TLS."""
    programs, cache = folder / "programs", folder / "kernels"
    programs.mkdir()
    _open_to_all(cache)
    for name in ("baton", "ray"):
        (programs / name).symlink_to(Path(sys.executable).with_name(name))
    (programs / "valkey-server").symlink_to(required_tls_binary())
    (programs / "valkey-cli").symlink_to(required_client())
    image = Image(
        (
            *base_mounts(),
            Mount(programs, "/opt/programs"),
            Mount(embedded_model(), "/opt/baton/baton-tiny"),
            Mount(cache, CACHE, read_only=False),
        ),
        {**QUIET, "XDG_CACHE_HOME": CACHE},
    )
    return lambda name: image


def _open_to_all(cache: Path) -> None:
    """Make a copy of this user's compiled kernels that the pods' user may write to."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    kept = [each for each in own.glob("kernels-*") if each.is_dir()]
    newest = sorted(kept, key=lambda each: each.stat().st_mtime)[-3:]
    for folder in newest:  # of the last versions of the code
        shutil.copytree(folder, cache / "baton" / folder.name)
    cache.mkdir(exist_ok=True)
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777)
