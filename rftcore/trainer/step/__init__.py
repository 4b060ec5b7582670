"""One trainer step: the signals read before it, the gradients and updates, their metrics, and whether it makes progress."""
