"""Estimates before a run starts: the memory of devices and hosts that it needs, and whether its model can be packed."""
