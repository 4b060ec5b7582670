"""The trainer's side of the buffer: attempts, sampling, batches, rewinds and stored selections."""
