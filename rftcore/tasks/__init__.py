"""Preparation of tasks: source checks, `pipelines.task`, and the vectors that its stages ask for."""
