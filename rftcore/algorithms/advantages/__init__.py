"""Advantages: from rewards to one number per token, one file each."""
