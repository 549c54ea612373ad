"""Pictures: one style, figures for papers, and the interactive page."""
