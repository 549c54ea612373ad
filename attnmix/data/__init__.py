"""Labelled reviews: where they come from, how they are drawn, and as what they are kept."""
