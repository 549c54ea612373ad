"""Token scores and their faithfulness (probability drops after token removal), and tests of the classifier's input."""
