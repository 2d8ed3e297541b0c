"""The `gaudi-bert` command line, which parses arguments, calls a stage or a runner, and prints the result."""

from gaudi_bert.cli.main import main as main
