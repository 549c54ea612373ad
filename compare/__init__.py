"""Experiments side by side: what DVC's store holds of them, over seeds, in one table, one figure and one page."""
