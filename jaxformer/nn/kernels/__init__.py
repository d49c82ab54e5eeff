"""Attention as programs for TPUs and GPUs, and which of them serves a call."""
