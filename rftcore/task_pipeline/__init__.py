"""The task pipeline: loading tasks from their sources through the stages of `pipelines.task` into the buffer."""
