"""Models and data sets from the hub, through its own client: patiently, checked file by file, at one commit."""
