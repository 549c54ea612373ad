"""The interactive page: one file that opens from disk and shows maps, ratios, text and steps, linked."""
