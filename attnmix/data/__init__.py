"""Labelled texts: reading, validation, sampling and splitting."""
