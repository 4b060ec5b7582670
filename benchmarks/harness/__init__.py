"""What all benchmarks share: options, results, workloads, models, processes and pictures."""
