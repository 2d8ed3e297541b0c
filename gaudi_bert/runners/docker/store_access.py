"""What a container needs to work with object stores: log-ins, certificates, a network that reaches them, room on the disk.

Variables go to the daemon with the container, as `docker run --env NAME` sends them; files are shown read-only. Neither is
written anywhere. What stages keep in scratch lies on the host's disk: a container's /tmp is memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gaudi_bert.artefacts.store.location import in_store, scheme_of
from gaudi_bert.common.errors import InputError
from gaudi_bert.config import PipelineSettings, StoreSettings
from gaudi_bert.runners.docker.mounts import bind_mount, secret_mount
from gaudi_bert.runners.named_paths import named_paths
from gaudi_bert.runners.stage_table import STAGES
from gaudi_bert.runners.store_environment import OF_STORES, loopback_endpoint, variables_of

__all__ = ["StoreAccess", "portable_settings", "store_access", "stored_places"]

HOME = "/tmp"


@dataclass(frozen=True)
class StoreAccess:
    """What a container gets besides; nothing, where its stage uses no store.

    Attributes:
        environment: variables.
        mounts: files and folders.
        host_network: whether it shares the host's network, because the server listens there on loopback alone.
        is_needed: whether the stage uses a store at all.
    """

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    mounts: list[dict[str, Any]] = field(default_factory=list)
    host_network: bool = False
    is_needed: bool = False


def stored_places(settings: PipelineSettings, work: Path, stage: str) -> list[str]:
    """The places in stores that `stage` reads or writes."""
    named: list[str | Path] = [place for key, place in named_paths(settings) if key in STAGES[stage].reads]
    return [str(place) for place in [work, *named] if in_store(place)]


def store_access(
    places: Iterable[str], store: StoreSettings, scratch: Path, environment: Mapping[str, str], workers: int = 1
) -> StoreAccess:
    """What a container gets to use `places`.

    Args:
        places: in stores.
        store: how they are reached.
        scratch: a folder of the host.
        environment: the caller's.
        workers: how many containers work together.

    Raises:
        InputError: a file that is named is not there, or the server cannot be reached from several containers.
    """
    schemes = {scheme_of(place) for place in places}
    home = Path(environment.get("HOME", "/"))
    variables: dict[str, str] = {}
    mounts = [bind_mount(scratch, "store.scratch", read_only=False)]
    for scheme in sorted(schemes):
        variables |= variables_of(scheme, environment)
        known = OF_STORES.get(scheme)
        for name in known.files if known else ():
            if name in variables:
                variables[name] = _show_file(mounts, name, Path(variables[name]))
        if known and (home / known.folder).is_dir():
            mounts.append(secret_mount(home / known.folder, f"{HOME}/{known.folder}"))
    if store.ca_file:
        variables["AWS_CA_BUNDLE"] = _show_file(mounts, "store.ca_file", Path(store.ca_file))
    loopback = loopback_endpoint(store, environment) if schemes & {"s3", "s3a"} else None
    if loopback and workers > 1:
        raise InputError(
            f"{loopback}: {workers} training containers have a network of their own, which does not reach this machine's "
            "loopback; name the server by another address of this machine, or set resources.workers to 1"
        )
    return StoreAccess(variables | {"TMPDIR": str(scratch)}, mounts, host_network=bool(loopback), is_needed=True)


def _show_file(mounts: list[dict[str, Any]], name: str, path: Path) -> str:
    """Show a file that `name` names; where it is in the container."""
    path = path.expanduser()
    if not path.is_file():
        raise InputError(f"{name} = {path}: no such file; check the path")
    target = f"/run/secrets/{name.lower().replace('.', '-')}"
    mounts[:] = [mount for mount in mounts if mount["Target"] != target]
    mounts.append(secret_mount(path, target))
    return target


def portable_settings(settings: PipelineSettings) -> PipelineSettings:
    """The settings for containers: without this machine's places, which variables name there."""
    places = {"scratch", "ca_file"} & settings.store.model_fields_set
    if not places:
        return settings
    kept = settings.store.model_dump(exclude_unset=True, exclude=places)
    return settings.model_copy(update={"store": StoreSettings.model_validate(kept)})
