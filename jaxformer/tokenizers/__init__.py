"""Tokenizers: trained here, or as published folders hold them."""
