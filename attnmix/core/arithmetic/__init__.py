"""Arithmetic with identical results on all x86-64 processors with AVX2, for all vendors and numbers of cores."""
