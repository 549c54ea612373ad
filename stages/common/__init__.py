"""Shared by all stages: the command, params.yaml, unfinished work and its lock, checks before the work."""
