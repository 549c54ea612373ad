"""Experiments: pipeline runs with several seeds, and a table and a figure that compare experiments."""
