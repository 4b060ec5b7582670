"""Weights as safetensors files: written by the trainer, published in a folder or in shared memory, read by engines."""
