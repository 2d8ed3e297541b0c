"""The files that stages leave behind: their paths, names and types, and how a stage decides that an artefact is finished."""
