"""Whether a place in an object store can be used: one object is written, read, listed and removed."""

from __future__ import annotations

import os
from contextlib import suppress

from gaudi_bert.artefacts.store.location import url_of
from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.errors import GaudiBertError
from gaudi_bert.config import StoreSettings
from gaudi_bert.runners.doctor.check_result import CheckResult, failed, passed

__all__ = ["check_store"]


def check_store(url: str, settings: StoreSettings) -> CheckResult:
    """What is missing to work below `url`; nothing is left there.

    Raises:
        InputError: `url` is no URL.
    """
    place = url_of(url)
    name, content = f"gaudi-bert-doctor-{os.urandom(8).hex()}", os.urandom(64)
    # Once or twice, not for as long as a stage would wait.
    objects = Objects(settings.model_copy(update={"attempts": min(settings.attempts, 3)}))
    done: list[str] = []
    try:
        objects.write(f"{place}/{name}", content)
        done.append("write")
        if objects.read(f"{place}/{name}") != content:
            return failed("store", f"{place}: an object was read back as another", "use a store that keeps what it is given")
        done.append("read")
        if name not in objects.list(place, only_here=True):
            return failed("store", f"{place}: an object that was written is not listed", "use a store that lists at once")
        done.append("list")
        objects.remove(f"{place}/{name}")
    except GaudiBertError as error:
        if done:
            with suppress(GaudiBertError):
                objects.remove(f"{place}/{name}")
        found, _, remedy = str(error).rpartition("; ")
        can = f" (it can {', '.join(done)})" if done else ""
        return failed("store", f"{found}{can}", remedy)
    return passed("store", f"{place}: write, read, list and remove")
