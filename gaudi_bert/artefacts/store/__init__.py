"""Where an artefact lies: in a folder, or in an object store."""
