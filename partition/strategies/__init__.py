"""Split strategies: how finely a layer is cut into partitions, and where.

Partitions of one layer stay on one rank; a finer split gives smaller functions to read and to time.
"""

from buddy_pipeline.partition.strategies.choosing import STRATEGIES, layer_splitter
from buddy_pipeline.partition.strategies.pieces import Layer, Piece, Splitter

__all__ = ["STRATEGIES", "Layer", "Piece", "Splitter", "layer_splitter"]
