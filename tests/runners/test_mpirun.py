"""How training processes are started, and what their containers ask for."""

from __future__ import annotations

import pytest

from gaudi_bert.config import load_pipeline
from gaudi_bert.runners.images import image_reference
from gaudi_bert.runners.mpirun import training_command
from gaudi_bert.runners.pod_resources import evaluation_resources, quantity_value, training_resources

STAGE = ["gaudi-bert", "run", "p.yaml", "--stages", "train"]


def test_one_process_needs_no_launcher() -> None:
    assert training_command(load_pipeline(None), STAGE, over_ssh=False) == STAGE


def test_one_server_starts_a_process_a_card() -> None:
    settings = load_pipeline(None, ["resources.cards=8", "resources.cores_per_process=6", "resources.mpi_prefix=/opt/mpi"])
    command = training_command(settings, STAGE, over_ssh=False)
    assert command[:3] == ["python3", "-m", "gaudi_bert.runners.stop_ranks"]
    assert command[3:15] == [
        *("/opt/mpi/bin/mpirun", "--allow-run-as-root", "--tag-output", "-np", "8"),
        *("--mca", "odls_base_sigkill_timeout", "4"),
        *("--bind-to", "core", "--map-by", "socket:PE=6"),
    ]
    assert command[15:] == ["--host", "localhost:8", *STAGE]
    assert "-x" not in command


@pytest.mark.parametrize(("workers", "cards", "processes"), [(1, 0, 1), (2, 0, 2), (3, 1, 3), (2, 8, 16), (5, 4, 20)])
def test_over_ssh_all_slots_are_filled_and_the_port_is_told(workers: int, cards: int, processes: int) -> None:
    settings = load_pipeline(None, [f"resources.workers={workers}", f"resources.cards={cards}"])
    command = training_command(settings, STAGE, over_ssh=True, variables=("MINE",), ssh_port=2222)
    assert command[command.index("-np") + 1] == str(processes)
    assert command[command.index("plm_rsh_args") + 1].startswith("-p 2222 ")
    passed = [command[index + 1] for index, word in enumerate(command) if word == "-x"]
    assert passed[0] == "PATH"
    assert passed[-1] == "MINE"
    assert ("HABANA_LOGS" in passed) == (cards > 0)
    assert command[-len(STAGE) :] == STAGE


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("500m", 0.5), ("2", 2), ("409Gi", 409 * 2**30), ("1k", 1000), ("95000Mi", 95000 * 2**20), ("1e3", 1000)],
)
def test_quantities_have_values(quantity: str, value: float) -> None:
    assert quantity_value(quantity) == pytest.approx(value)


@pytest.mark.parametrize("quantity", ["", "lots", "1GiB", "-1"])
def test_what_is_no_quantity_has_none(quantity: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity_value(quantity)


def test_with_cards_requests_equal_limits() -> None:
    settings = load_pipeline(
        None,
        [
            *("resources.cards=8", "resources.workers=2", "kubernetes.efa=4", "resources.hugepages_2Mi=95000Mi"),
            "resources.training={cpu: 95, memory: 409Gi}",
        ],
    )
    asked = training_resources(settings)
    assert asked["requests"] == asked["limits"]
    assert asked["limits"]["vpc.amazonaws.com/efa"] == "4"
    one = evaluation_resources(settings.resources)
    assert one["limits"] == {"cpu": "11", "memory": "52352Mi", "habana.ai/gaudi": "1", "hugepages-2Mi": "11874Mi"}


def test_a_share_of_less_than_a_core_is_in_thousandths() -> None:
    settings = load_pipeline(None, ["resources.cards=8", "resources.training={cpu: 2, memory: 8Gi}"])
    assert evaluation_resources(settings.resources)["limits"]["cpu"] == "250m"


def test_images_have_registry_and_version() -> None:
    from gaudi_bert import __version__

    assert image_reference(load_pipeline(None).images, "gaudi-bert-data") == f"gaudi-bert-data:{__version__}"
    images = load_pipeline(None, ["images.registry=registry.example:5000/us", "images.tag=v2"]).images
    assert image_reference(images, "x") == "registry.example:5000/us/x:v2"
