"""A run's folder: `runs` holds the paths and reads the files, `writers`, `texts` and `features` write them."""
