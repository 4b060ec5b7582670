"""Tasks before they are tried: source checks, `pipelines.task`, and the vectors its stages ask for."""
