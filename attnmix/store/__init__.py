"""A run's folder: `layout` holds the paths, `runs` reads the files, `writers` and `features` write them."""
