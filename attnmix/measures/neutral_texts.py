"""Neutral English sentences that serve as donor texts, for example for a single text (`attnmix.measures.exchange`)."""

NEUTRAL_TEXTS = (
    "The train to the coast leaves every hour from the second platform and arrives before noon.",
    "A grey cat sat on the wall while two children carried a ladder across the yard.",
    "Most of the papers on the desk were letters about the new bridge over the river.",
    "In the morning she opened the window, made some tea and wrote down three numbers.",
)
"""Everyday statements without praise, blame or negation."""
