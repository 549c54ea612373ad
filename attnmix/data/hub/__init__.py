"""Models and data sets from the hub, by its own client: with retries, each file checked, at one commit."""
