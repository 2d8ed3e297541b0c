"""The command line: it parses, calls a stage or a runner, and prints. It does no work itself."""

from gaudi_bert.cli.main import main as main
