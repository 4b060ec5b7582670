"""Stages of `pipelines.task`: they score tasks before any rollout is spent on them."""
