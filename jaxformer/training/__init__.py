"""Loss, optimizer, one pure update, checkpoints, metrics."""
