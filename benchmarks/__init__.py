"""Benchmarks: programs that measure one question each and print JSON. `rft bench` lists them."""
