"""Stages of `pipelines.task`, which score tasks before any rollout is spent on them."""
