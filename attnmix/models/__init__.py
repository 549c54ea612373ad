"""Attention functions, capture points, and functions that load models and tokenizers."""
