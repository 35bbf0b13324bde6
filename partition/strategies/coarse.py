"""`coarse`: a layer is one partition."""

from buddy_pipeline.partition.strategies.pieces import Layer, Piece


def split(layer: Layer) -> list[Piece]:
    """The whole layer as one piece."""
    return [Piece("", layer.nodes)]
