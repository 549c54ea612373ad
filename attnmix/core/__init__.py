"""Modules shared by all packages: errors, names, settings, statistics and storage."""
