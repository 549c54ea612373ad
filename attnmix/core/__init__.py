"""Shared by the whole library: errors, names, options, statistics."""
