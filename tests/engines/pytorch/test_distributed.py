"""What two processes add up and share: sums of gradients that begin while the backward pass runs have the bits of those that
follow it, and arrays of the host are those of rank 0.

In a file that loads little: each of the two processes imports it again.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import distributed as torch_distributed
from torch import multiprocessing
from torch.nn import Parameter

from gaudi_bert.engines.pytorch.distributed import GradientReducer, TorchCommunicator

# One that is in several places, one that needs no gradient, one that no loss needs, and one larger than a part.
SHAPES = {"shared": (3, 3), "first": (3,), "frozen": (3,), "unused": (2, 5), "large": (3, 41), "last": (41,)}
PART_BYTES = 64


def parameters_of(seed: int) -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: Parameter(torch.randn(shape, generator=generator), requires_grad=name != "frozen")
        for name, shape in SHAPES.items()
    }


def loss_of(parameters: dict[str, Parameter], inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs @ parameters["shared"] + parameters["first"] * parameters["frozen"])
    return ((hidden @ parameters["shared"] @ parameters["large"] + parameters["last"]) ** 2).sum()


def in_one_process(rank: int, folder: str) -> None:
    torch_distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    overlapped, naive = parameters_of(1), parameters_of(1)
    sums = GradientReducer(list(overlapped.values()), PART_BYTES)
    orders = []
    right = torch_distributed.all_reduce

    def recorded(tensor, **options):
        orders.append(tensor.numel())
        return right(tensor, **options)

    found: dict[str, np.ndarray] = {}
    for update in range(2):
        inputs = torch.randn((3, 4, 3), generator=torch.Generator().manual_seed(10 * update + rank))
        torch_distributed.all_reduce = recorded
        for number, micro_batch in enumerate(inputs):
            if number == len(inputs) - 1:
                assert len(orders) == update * 4  # nothing travels before the last pass
                sums.prepare_last_backward_pass()
            loss_of(overlapped, micro_batch).backward()
            loss_of(naive, micro_batch).backward()
        assert len(orders) > update * 4, "no sum began while the last pass ran"
        sums.wait_for_sums()
        torch_distributed.all_reduce = right
        for name, parameter in naive.items():
            total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch_distributed.all_reduce(total)
            found[f"{update} {name} naive"] = total.numpy().copy()
            found[f"{update} {name}"] = overlapped[name].grad.numpy().copy()
            overlapped[name].grad = parameter.grad = None
    found["orders"] = np.array(orders)
    communicator = TorchCommunicator(rank, 2)
    found["shared"] = communicator.broadcast({"statistics": np.full(3, 5 + rank)})["statistics"]
    found["summed"] = communicator.sum_array(np.array([1.0, rank]))
    np.savez(f"{folder}/rank-{rank}.npz", **found)
    torch_distributed.destroy_process_group()


def test_sums_that_overlap_the_last_pass_have_the_same_bits_and_what_is_shared_is_of_rank_0(tmp_path: Path) -> None:
    multiprocessing.spawn(in_one_process, (str(tmp_path),), nprocs=2)
    ranks = [np.load(tmp_path / f"rank-{rank}.npz") for rank in (0, 1)]
    for name in (f"{update} {name}" for update in (0, 1) for name in SHAPES):
        for rank in ranks:
            np.testing.assert_array_equal(rank[name], ranks[0][f"{name} naive"], err_msg=name)
    assert any(ranks[0]["0 shared"].ravel() != 0)
    one, other = (rank["orders"].tolist() for rank in ranks)
    for rank in ranks:
        assert (rank["shared"].tolist(), rank["summed"].tolist()) == ([5, 5, 5], [2.0, 1.0])
    assert one == other == 2 * [41, 123, 10, 15]  # the last parameters first, in every process
