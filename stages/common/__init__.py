"""What all stages share: the command, params.yaml, unfinished work, the lock of a stage."""
