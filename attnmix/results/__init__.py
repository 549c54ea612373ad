"""Results of measured texts: one class for one model, one for the comparison of two, their tables, files and pages."""
