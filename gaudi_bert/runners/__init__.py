"""Runners for the stages of a pipeline: in this process, in containers on this machine, or as Jobs on a cluster."""
