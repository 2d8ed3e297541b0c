"""One module per stage: settings and folders in, artefacts out. A stage is what a container runs."""
