"""Shared code of the stages: the command, params.yaml, unfinished work and its lock."""
