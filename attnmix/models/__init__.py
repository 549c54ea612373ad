"""Loading of models and tokenizers, attention functions, and capture points."""
