"""One arithmetic on all x86-64 processors with AVX2, of any maker and with any number of cores."""
