"""Results of measured texts: `Measures` for one model, `Comparison` for two models, with tables, files and pages."""
