"""The trainer: what it is told, how a batch is laid out, and how weights change. The loop draws and the learner learns."""
