"""`fine`: every module of a layer and every residual sum is a partition.

For most decoders that is norm, attention, residual, norm, feed-forward, residual.
"""

from buddy_pipeline.partition.strategies.pieces import Layer, Piece, by_module


def split(layer: Layer) -> list[Piece]:
    """A piece for each direct child module, and for what the layer computes between them."""
    return by_module(layer)
