"""Small layered graphs in the shape that `compile/` takes from torch.export."""

import random
from dataclasses import replace

from hypothesis import strategies as st

from buddy_pipeline.partition.graph import GraphNode, NodeKind
from buddy_pipeline.partition.ownership import ATTENTION_OP

LINEAR = "aten.linear.default"


class GraphBuilder:
    """Appends nodes with readable names; every method returns the new node's name."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []

    def add(self, name: str, kind: NodeKind, *inputs: str, module: str = "", op: str = "") -> str:
        self.nodes.append(GraphNode(name, op, inputs, module, kind))
        return name

    def compute(self, name: str, *inputs: str, module: str = "", op: str = "aten.add") -> str:
        return self.add(name, NodeKind.COMPUTE, *inputs, module=module, op=op)

    def linear(self, name: str, source: str, module: str) -> str:
        weight = self.add(f"{name}_weight", NodeKind.PARAMETER)
        return self.add(name, NodeKind.KERNEL, source, weight, module=module, op=LINEAR)

    def attention(self, name: str, *inputs: str, module: str) -> str:
        return self.add(name, NodeKind.KERNEL, *inputs, module=module, op=ATTENTION_OP)


def decoder(
    layers: int, path: str = "model.layers", residual_to_all: bool = False
) -> list[GraphNode]:
    """A decoder like Llama's: embedding, rotary tables, layers, a norm of `1 + weight`, tied head.

    With `residual_to_all` every layer also reads the embedding.
    """
    g = GraphBuilder()
    table = g.add("table", NodeKind.PARAMETER)
    norm_weight = g.add("norm_weight", NodeKind.PARAMETER)
    frequencies = g.add("frequencies", NodeKind.CONSTANT)
    ids = g.add("ids", NodeKind.TOKENS)
    positions = g.add("positions", NodeKind.POSITIONS)
    hidden = embedded = g.add(
        "embed", NodeKind.KERNEL, table, ids, module="model.embed_tokens", op="aten.embedding"
    )
    angle = g.compute("angle", positions, frequencies, module="model.rotary_emb")
    cos = g.compute("cos", angle, module="model.rotary_emb")
    for i in range(layers):
        at = f"{path}.{i}"
        normed = g.compute(f"normed{i}", hidden, module=f"{at}.norm")
        query = g.linear(f"query{i}", normed, f"{at}.self_attn.q_proj")
        turn = g.add(f"turn{i}", NodeKind.VIEW, cos, module=f"{at}.self_attn")
        rotated = g.compute(f"rotated{i}", query, turn, module=f"{at}.self_attn")
        mixed = g.attention(f"attend{i}", rotated, query, query, module=f"{at}.self_attn")
        # A module list inside the layer, as in a mixture of experts.
        first = g.linear(f"expert{i}_0", mixed, f"{at}.mlp.experts.0")
        second = g.linear(f"expert{i}_1", mixed, f"{at}.mlp.experts.1")
        extra = (embedded,) if residual_to_all else ()
        hidden = g.compute(f"hidden{i}", hidden, first, second, *extra, module=at)
    gain = g.compute("gain", norm_weight, module="model.norm")
    final = g.compute("final", hidden, gain, module="model.norm")
    logits = g.add("logits", NodeKind.KERNEL, final, table, module="lm_head", op=LINEAR)
    g.add("output", NodeKind.OUTPUT, logits)
    return g.nodes


@st.composite
def random_decoders(draw: st.DrawFn) -> list[GraphNode]:
    """Layered graphs with random wiring, random position-only values and no dead node.

    Every node reads the latest value, so that all are used, and up to two older ones, so that
    values skip over layers and cross many boundaries.
    """
    rng = random.Random(draw(st.integers(0, 2**32)))
    g = GraphBuilder()
    constant = g.add("constant", NodeKind.CONSTANT)
    ids = g.add("ids", NodeKind.TOKENS)
    positions = g.add("positions", NodeKind.POSITIONS)
    free = [constant, positions]
    made: list[str] = []

    def grow(module: str, count: int) -> None:
        for i in range(count):
            name = f"{module.replace('.', '_')}_{i}"
            side = rng.choice(free)
            if rng.random() < 0.25:
                side = g.compute(f"{name}_free", side, module=module)
                free.append(side)
            older = rng.sample(made, min(len(made), rng.randint(0, 2)))
            latest = made[-1:] or [ids]
            made.append(g.compute(name, *latest, *older, side, module=module))

    grow("model.embed", draw(st.integers(1, 4)))
    for layer in range(draw(st.integers(1, 6))):
        at = f"model.layers.{layer}"
        grow(at, draw(st.integers(0, 4)))
        made.append(g.attention(f"attend{layer}", made[-1], module=f"{at}.attn"))
        grow(f"{at}.mlp", draw(st.integers(0, 4)))
    grow("model.head", draw(st.integers(1, 4)))
    g.add("output", NodeKind.OUTPUT, made[-1])
    return g.nodes


def with_inputs(nodes: list[GraphNode], name: str, *inputs: str) -> list[GraphNode]:
    """The same graph, but node `name` reads `inputs`."""
    return [replace(n, inputs=inputs) if n.name == name else n for n in nodes]
