"""One pure update on many devices."""
