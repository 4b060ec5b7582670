"""The buffer's side of pipelines: what workers claim, what stages decided, and what they may spend."""
