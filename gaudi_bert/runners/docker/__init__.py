"""Stages in containers of this machine."""
