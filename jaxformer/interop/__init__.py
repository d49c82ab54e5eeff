"""A config as a module of other libraries."""
