"""How much the class's probability falls when the tokens that a measure ranks first are removed, and the margins."""
