"""Downloads of models and datasets from the hub by its own client, with retries, checksums and fixed commits."""
