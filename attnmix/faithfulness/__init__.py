"""Faithfulness of token scores (probability drops after token removal), use of the class, and margins."""
