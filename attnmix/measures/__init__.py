"""Measures of mixing: contributions of other tokens and of the token itself, layer by layer and from the input."""
