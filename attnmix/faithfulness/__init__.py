"""Faithfulness of token scores (probability drops after token removal), class margins, probes and interventions."""
