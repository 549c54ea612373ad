"""Steps of a pipeline run; each step loads results of earlier steps from a `Run` and writes one of its folders."""
