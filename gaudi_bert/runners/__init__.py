"""Where a stage runs: this process, a container, a cluster."""
