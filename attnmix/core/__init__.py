"""Shared by the whole library: errors, names, statistics."""
