"""`block`: attention and feed-forward apart, each with the norms and the residual sum around it."""

from buddy_pipeline.partition.strategies.pieces import Layer, Piece, by_module, join

ATTENTION, FEED_FORWARD = "attention", "feed_forward"


def split(layer: Layer) -> list[Piece]:
    """Two pieces, in the order in which the layer runs them; one if nothing but attention is there.

    The cut lies behind the residual sum that closes the first of the two. A layer in which both
    read the same norm has no such sum between them; there it lies right behind the first.
    """
    pieces = by_module(layer)
    attention = next(i for i, piece in enumerate(pieces) if piece.attends)
    others = [i for i, p in enumerate(pieces) if p.has_weights and not p.attends]
    if not others:
        return join([(ATTENTION, pieces)])
    attention_first = others[-1] > attention
    end = attention if attention_first else others[-1]
    following = others[-1] if attention_first else attention
    sums = [i for i in range(end + 1, following) if pieces[i].is_residual]
    cut = (sums[0] if sums else end) + 1
    names = (ATTENTION, FEED_FORWARD) if attention_first else (FEED_FORWARD, ATTENTION)
    return join([(names[0], pieces[:cut]), (names[1], pieces[cut:])])
