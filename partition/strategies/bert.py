"""BERT as a decoder: residual sums lie inside its modules, and each norm follows its sum."""

from buddy_pipeline.partition.strategies.pieces import Layer, Piece, by_part


def fine(layer: Layer) -> list[Piece]:
    """Attention, sum and norm, feed-forward, sum and norm."""
    return by_part(layer, _part)


def _part(inside: str) -> str:
    """Both halves of a layer end in a module `output`: a linear, then a sum, then a norm."""
    if inside.endswith(("output", "output.LayerNorm")):
        return "norm"
    return "attention" if inside.startswith("attention.") else "feed_forward"
