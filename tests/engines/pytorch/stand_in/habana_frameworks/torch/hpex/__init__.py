"""The fused parts: nothing may import them unasked."""

from habana_frameworks.record import record

record("import habana_frameworks.torch.hpex")
