"""Model files, loading, and the capture points of features."""
