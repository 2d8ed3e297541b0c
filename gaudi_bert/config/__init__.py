"""The pipeline file as typed, frozen settings: the one place where a default lives. `pipeline.py` has it as a whole."""
