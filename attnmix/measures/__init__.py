"""Measures of mixing: how much of a token's vector comes from other tokens, layer by layer."""
