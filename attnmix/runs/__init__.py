"""Steps of a run: each reads results of earlier steps from a `Run`, and writes one of its folders."""
