"""OPT: its feed-forward is no module of its own, but `fc1`, `activation_fn`, `fc2` in the layer."""

from buddy_pipeline.partition.strategies.pieces import Layer, Piece, by_module, join


def fine(layer: Layer) -> list[Piece]:
    """As the general strategy, with the three parts of the feed-forward as one piece."""
    pieces = by_module(layer)
    first = next(i for i, piece in enumerate(pieces) if piece.name == "fc1")
    last = next(i for i, piece in enumerate(pieces) if piece.name == "fc2")
    return join(
        [
            *((piece.name, [piece]) for piece in pieces[:first]),
            ("feed_forward", pieces[first : last + 1]),
            *((piece.name, [piece]) for piece in pieces[last + 1 :]),
        ]
    )
