"""Files of a run: paths and readers in `runs`, writers in `writers`, `texts` and `features`."""
