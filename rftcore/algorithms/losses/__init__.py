"""Losses of tokens, sequences and pairs, one file each."""
