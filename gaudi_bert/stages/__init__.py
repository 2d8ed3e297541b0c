"""One module a stage: settings and folders in, artefacts out. A stage is what a container runs."""
