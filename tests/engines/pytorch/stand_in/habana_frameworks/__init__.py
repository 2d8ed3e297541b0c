"""A stand-in for the vendor's software of today on a machine without a card: a device `hpu` that computes on the CPU.

It writes down what is called, in which order and in which environment (`record.py`). Tensors on `hpu` are real ones to
PyTorch: dispatch, autograd, autocast, torch.compile and torch.distributed treat them as those of a device of its own, and an
operation that mixes them with tensors of the CPU fails.

What it proves: the order of the documented calls, their arguments, the variables at that time, which types an operation is
given, what is compiled and by which backend, that a run with it ends, and with which figures.
What it cannot: the vendor's compiler, kernels, rounding, memory and collectives between cards, and that its software
does what is documented.
"""

from habana_frameworks.record import VARIABLES, record

record("import habana_frameworks", variables=VARIABLES)
