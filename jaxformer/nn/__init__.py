"""Pure functions of explicit parameters, one component a file."""
