"""Which measure deserves belief: scores of tokens, what removing them does, and how sure the classifier is."""
