"""Measures of how self-attention mixes the vectors of tokens: models in; tensors, tables, figures and a page out."""
