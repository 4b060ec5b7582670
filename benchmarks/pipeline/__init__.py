"""Pipeline stages, the chain around them and pipeline workers."""
