"""Registers the device `hpu` when it is imported, and autocast by the lists that the environment names by then."""

from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from habana_frameworks.record import VARIABLES, record
from habana_frameworks.torch import autocast, hpu, tensors

record("import habana_frameworks.torch.core", variables=VARIABLES)
_setup_privateuseone_for_python_backend("hpu", hpu)
tensors.register()
autocast.register()
