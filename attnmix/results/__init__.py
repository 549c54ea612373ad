"""Results for measured texts: `Measures` (one model) and `Comparison` (two models), and their tables and pages."""
