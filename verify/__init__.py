"""Whether the same commit gives the same bytes elsewhere: the pipeline in clones, and what differs between them."""
