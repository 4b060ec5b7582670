"""Estimates of what a run needs of its machines, before it starts: memory of devices and hosts, and a trial of packing."""
