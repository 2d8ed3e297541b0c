"""A run whose work folder is in a bucket: nothing is asked of volumes, and the bucket is touched only when told."""

from __future__ import annotations

import pytest

from gaudi_bert.artefacts.store.objects import Objects
from gaudi_bert.common.progress import Reporter
from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.kubernetes import manage
from gaudi_bert.runners.kubernetes.client import Cluster
from gaudi_bert.runners.kubernetes.run import run_on_kubernetes
from tests.builders.fake_api_server import FakeApiServer
from tests.builders.s3_server import S3Server, contents, quick


@pytest.mark.parametrize("data", [False, True])
def test_the_bucket_is_touched_only_with_data(
    data: bool, server: FakeApiServer, cluster: Cluster, reporter: Reporter, s3: S3Server
) -> None:
    settings = load_pipeline(None, ["kubernetes.store=s3://bucket/cluster", f"store.endpoint_url={s3.endpoint}"])
    objects = Objects(quick(s3.endpoint))
    before = {"demo/plan.json": b"plan", "demo/packed/train/metadata.json": b"metadata", "demo-2/plan.json": b"another's"}
    for name, content in before.items():
        objects.write(f"s3://bucket/cluster/{name}", content)
    run_on_kubernetes(settings, ["plan"], reporter, cluster)
    assert server.created("PersistentVolumeClaim") == []
    removed = manage.delete(settings, cluster, data=data)
    assert "Job demo-plan" in removed
    assert ("2 objects below s3://bucket/cluster/demo" in removed) is data
    assert contents("s3://bucket/cluster", objects) == ({"demo-2/plan.json": b"another's"} if data else before)
