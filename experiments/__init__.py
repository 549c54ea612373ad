"""Experiments over seeds and side by side: run the pipeline for each seed; one table and one figure of any of them."""
