"""Published checkpoints: one table a family, no forward of its own."""
