"""Models: where their files come from, how they are loaded, and where features are taken."""
