"""The documents that `measure` reads and what it has measured so far, on disk."""
