"""Proofs that a user can run: of a model, of a run, of a machine."""
