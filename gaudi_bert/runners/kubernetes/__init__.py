"""Stages as Jobs of a cluster."""
