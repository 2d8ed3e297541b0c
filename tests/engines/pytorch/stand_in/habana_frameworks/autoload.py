"""What `import torch` calls at its end, as with the vendor's package (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off)."""


def load() -> None:
    import habana_frameworks.torch.core  # noqa: F401
