"""The pipeline file as typed, frozen settings: defaults are defined here alone. `pipeline.py` puts the sections together."""
