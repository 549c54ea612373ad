"""Shared by all stages: the command, params.yaml, unfinished work, the lock of a stage."""
