"""A run's folder: `layout` says where each file lies, `runs` reads them, `writers` and `features` write them."""
