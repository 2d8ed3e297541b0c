"""The command line: parses, calls a stage or a runner, prints. No work is done here."""

from gaudi_bert.cli.main import main

__all__ = ["main"]
