"""MLIR text of the kernels that are not imported from the graph: linear, attention, embedding."""
