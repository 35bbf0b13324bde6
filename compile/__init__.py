"""Compiling the partitions of a model to objects for one CPU, and loading them."""
