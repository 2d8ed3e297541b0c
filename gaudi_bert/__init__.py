"""gaudi-bert: pack BERT pretraining data, prove the packing, and train on it, on Gaudi or on a CPU."""

__all__ = ["__version__"]

__version__ = "0.2.0"
