"""Where an artefact is stored: in a folder, or in an object store."""
