"""What became of a Job, why it has no pods, and why a claim is not bound."""

from __future__ import annotations

from typing import Any

import pytest

from gaudi_bert.runners.kubernetes.job_problems import claim_problem, job_outcome, no_pods_problem

MPIJOB = {"kind": "MPIJob", "metadata": {"name": "demo-train"}}


@pytest.mark.parametrize(
    ("conditions", "outcome"),
    [
        ([], None),
        ([{"type": "Complete", "status": "False"}], None),
        ([{"type": "Complete", "status": "True"}], "complete"),
        ([{"type": "Created", "status": "True"}, {"type": "Succeeded", "status": "True"}], "complete"),
        (
            [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "late"}],
            "failed: DeadlineExceeded: late",
        ),
    ],
)
def test_the_outcome_of_a_job_is_in_its_conditions(conditions: list[dict[str, Any]], outcome: str | None) -> None:
    assert job_outcome({"status": {"conditions": conditions}}) == outcome


def test_a_bound_claim_is_no_problem() -> None:
    claim = {"metadata": {"name": "work"}, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}}
    assert claim_problem(claim, []) is None
    problem = claim_problem({**claim, "status": {"phase": "Pending"}}, [])
    assert problem is not None
    assert "work is Pending, not Bound (the default class, ReadWriteMany)" in problem.reason


@pytest.mark.parametrize(
    ("said", "hopeless", "remedy"),
    [
        (
            'pods "demo-train-worker-0" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true',
            True,
            "pod security forbids such pods",
        ),
        ('Error creating: pods "x" is forbidden: exceeded quota: team, requested: cpu=95', False, "wait until the quota"),
        ('admission webhook "policy.example" denied the request: no owner label', True, "the cluster's own rules"),
        ("pods is forbidden: maximum memory usage per Container is 1Gi, but limit is 4Gi", True, "LimitRange"),
    ],
)
def test_pods_that_are_refused_have_the_remedy_for_their_refusal(said: str, hopeless: bool, remedy: str) -> None:
    events = [{"type": "Warning", "message": "an older one"}, {"type": "Warning", "message": said}]
    problem = no_pods_problem(MPIJOB, events)
    assert said in problem.reason
    assert remedy in problem.remedy
    assert problem.hopeless is hopeless
    assert not problem.only_slow


def test_a_job_without_pods_and_warnings_is_only_slow() -> None:
    problem = no_pods_problem(MPIJOB, [{"type": "Normal", "message": "Created"}])
    assert problem.only_slow
    assert problem.remedy == "see that the MPI operator runs"
