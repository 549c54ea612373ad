"""Measures of mixing: what other tokens give a token and what is its own, layer by layer and from the input on."""
