"""Maps: neighbours, layouts, and what a map is worth."""
