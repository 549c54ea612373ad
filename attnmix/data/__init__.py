"""Labelled reviews: reading, checking, drawing and splitting."""
