"""Receiving weights in vLLM's workers: from the trainer or from a file, whole or as adapters, and comparing them."""
