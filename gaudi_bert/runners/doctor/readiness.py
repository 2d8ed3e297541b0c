"""`gaudi-bert doctor`: is this host, or this cluster, ready for what a pipeline asks, and what is to be mended.

Looking and judging are apart: `look_*` collects what commands, files and the API answer, and the checks in `doctor_host` and
`doctor_cluster` are functions of those answers alone, so that they are tested on recorded ones.
"""

from __future__ import annotations

from gaudi_bert.config import PipelineSettings
from gaudi_bert.runners.doctor.finding import Finding

__all__ = ["examine_cluster", "examine_host"]


def examine_host(settings: PipelineSettings) -> list[Finding]:
    """What is right and wrong with this machine, for training as `settings` ask."""
    from gaudi_bert.runners.doctor import host

    return host.judge(host.look(), settings)


def examine_cluster(settings: PipelineSettings) -> list[Finding]:
    """What is right and wrong with the cluster.

    Raises:
        InputError: there is no cluster.
    """
    from gaudi_bert.runners.doctor import cluster
    from gaudi_bert.runners.kubernetes.client import Cluster

    return cluster.judge(cluster.look(Cluster(settings.kubernetes.namespace)), settings)
