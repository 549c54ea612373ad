"""Measures of mixing: how much of each token's vector comes from other tokens, and how much from the token itself."""
