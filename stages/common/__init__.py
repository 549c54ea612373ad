"""Shared code of the stages: the command line, params.yaml, unfinished work and the lock of a stage."""
