"""What every room of the library needs: errors, names, options, statistics."""
