"""Downloads of models and data sets from the hub by its own client, with retries, checksums and fixed commits."""
