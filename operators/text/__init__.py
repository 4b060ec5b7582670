"""Comparing texts: n-grams and MinHash."""
