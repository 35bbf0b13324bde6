"""What the benchmarks share: limits of the machine, work of a model, contestants, tables."""
