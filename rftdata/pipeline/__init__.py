"""The buffer's side of pipelines: claims of workers, decisions of stages, and budgets."""
