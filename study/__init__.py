"""The study: one experiment of the pipeline for each fine-tuning seed, and what they say together."""
