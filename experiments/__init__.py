"""Experiments: the pipeline for several seeds, and one table and one figure of any experiments."""
