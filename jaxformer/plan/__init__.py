"""What a run would need and take on devices that are not there: memory, FLOPs, traffic, time."""
