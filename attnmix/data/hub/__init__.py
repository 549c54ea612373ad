"""Downloads of models and datasets by `huggingface_hub`, with retries, verified checksums and fixed commits."""
