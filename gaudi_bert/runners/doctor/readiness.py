"""`gaudi-bert doctor`: is this host, or this cluster, ready for what a pipeline asks, and what is to be mended.

Asking and checking are apart: `ask_*` collects what commands, files and the API answer, and the checks are functions of
those answers alone, so that they are tested on recorded ones.
"""

from __future__ import annotations

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.check_result import CheckResult

__all__ = ["examine_cluster", "examine_host", "examine_store"]


def examine_host(settings: PipelineSettings) -> list[CheckResult]:
    """What is right and wrong with this machine, for training as `settings` ask."""
    from gaudi_bert.runners.doctor.host_answers import ask_host
    from gaudi_bert.runners.doctor.host_checks import check_host

    return check_host(ask_host(), settings)


def examine_cluster(settings: PipelineSettings) -> list[CheckResult]:
    """What is right and wrong with the cluster.

    Raises:
        InputError: there is no cluster.
    """
    from gaudi_bert.runners.doctor.cluster_answers import ask_cluster
    from gaudi_bert.runners.doctor.cluster_checks import check_cluster
    from gaudi_bert.runners.kubernetes.client import Cluster

    return check_cluster(ask_cluster(Cluster(settings.kubernetes.namespace), settings), settings)


def examine_store(url: str, settings: PipelineSettings) -> CheckResult:
    """Whether objects below `url` can be written, read, listed and removed from here."""
    from gaudi_bert.runners.doctor.store_check import check_store

    return check_store(url, settings.store)
