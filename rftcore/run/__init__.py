"""What a run needs on its machines: placement on GPUs, defaults for the device, stacks, and how a role joins it."""
