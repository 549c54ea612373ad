"""Figures for papers, in one style, and the labels and colours of figures and page."""
