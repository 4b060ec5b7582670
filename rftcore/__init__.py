"""Explorer, trainer, pipeline workers and the command line around the buffer."""
