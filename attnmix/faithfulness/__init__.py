"""The fall of the class's probability when the tokens that a measure ranks first are removed, and the margins."""
