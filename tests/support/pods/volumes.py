"""The volumes of a pod as folders of this machine: emptyDir, secret, configMap, claim, hostPath.

What lasts as long as the pod lies in its folder `volatile`; in memory (/dev/shm) where the manifest
says Memory. Files of Secrets belong to root and the pod's group, as `defaultMode` says.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.pods.container import ContainerSite, Mount
from tests.support.pods.secrets_server import SecretsServer

Document = dict[str, Any]
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def volumes_of(
    spec: Document,
    site: ContainerSite,
    claims: Path,
    api: SecretsServer,
    config_maps: Mapping[str, Document],
) -> dict[str, Mount]:
    """Make a pod's volumes. Claims are folders in `claims`. Raises KeyError for a Secret or
    ConfigMap that is not there, ValueError for another kind of volume."""
    made = {}
    for volume in spec.get("volumes", ()):
        name = volume["name"]
        folder = site.folder / "volatile" / name
        if "emptyDir" in volume:
            made[name] = Mount(_empty(folder, site, volume["emptyDir"] or {}), name, False)
        elif "secret" in volume:
            made[name] = Mount(_secret_files(volume, site, api), name)
        elif "configMap" in volume:
            found = config_maps[volume["configMap"]["name"]]["data"]
            data = {key: text.encode() for key, text in found.items()}
            made[name] = Mount(_files(folder, data, 0o644, site.group), name)
        elif "persistentVolumeClaim" in volume:
            claim = claims / f"claim-{volume['persistentVolumeClaim']['claimName']}"
            claim.mkdir(exist_ok=True)
            os.chown(claim, -1, site.group)
            claim.chmod(0o2775)
            made[name] = Mount(claim, name, False)
        elif "hostPath" in volume:
            made[name] = Mount(Path(volume["hostPath"]["path"]), name, False)
        else:
            raise ValueError(f"the volume {name} is of a kind that is not known here")
    return made


def account_mounts(spec: Document, site: ContainerSite, api: SecretsServer) -> tuple[Mount, ...]:
    """Return the mount of the service account's files, if the pod wants it."""
    if not spec.get("automountServiceAccountToken"):
        return ()
    folder = site.folder / "volatile" / "service-account"
    files = api.account_files(spec["serviceAccountName"])
    return (Mount(_files(folder, files, 0o440, site.group), ACCOUNT),)


def _empty(folder: Path, site: ContainerSite, options: Document) -> Path:
    folder.mkdir(parents=True)
    if options.get("medium") == "Memory":
        inner = Path("/dev/shm") / f"pods-{os.getpid()}-{site.folder.name}-{folder.name}"
        inner.mkdir(exist_ok=True)
        folder.rmdir()
        folder.symlink_to(inner)
        folder = inner
    os.chown(folder, -1, site.group)
    folder.chmod(0o2777)
    return folder


def refresh_secret(spec: Document, site: ContainerSite, name: str, api: SecretsServer) -> None:
    """Write a Secret's data again where a pod mounts it."""
    for volume in spec.get("volumes", ()):
        if volume.get("secret", {}).get("secretName") == name:
            _secret_files(volume, site, api)


def _secret_files(volume: Document, site: ContainerSite, api: SecretsServer) -> Path:
    """Write the files of a volume that mounts a Secret, or those of its `items`."""
    secret = volume["secret"]
    data = api.data(secret["secretName"])
    if items := secret.get("items"):
        data = {each["path"]: data[each["key"]] for each in items}
    folder = site.folder / "volatile" / volume["name"]
    return _files(folder, data, int(secret.get("defaultMode", 0o644)), site.group)


def _files(folder: Path, data: Mapping[str, bytes], mode: int, group: int) -> Path:
    """Write files as a kubelet does: each is a link through `..data`, which changes at once."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = Path(tempfile.mkdtemp(prefix="..", dir=folder))
    inner.chmod(0o755)
    for name, content in data.items():
        path = inner / name
        path.write_bytes(content)
        os.chown(path, 0, group)
        path.chmod(mode)
    current, following = folder / "..data", folder / "..data_tmp"
    old = current.resolve() if current.is_symlink() else None
    following.symlink_to(inner.name)
    following.rename(current)
    for name in data.keys() - {each.name for each in folder.iterdir()}:
        (folder / name).symlink_to(f"..data/{name}")
    if old is not None:
        shutil.rmtree(old)
    return folder
