"""Drafting: a partition's fragments on an args table, with temporaries shared by lifetime."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.args_table import ArgsTable
from buddy_pipeline.compile.binding import Bound, bind, loaded_per_head
from buddy_pipeline.compile.draft import (
    Attention,
    Draft,
    Embedding,
    ExpertLinear,
    Gather,
    IslandCall,
    Item,
    Linear,
    Row,
    TopK,
)
from buddy_pipeline.compile.epilogues import Epilogue
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.islands import signature
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.manifest import ROW_PAD, KvLayer, Value
from buddy_pipeline.compile.node_weights import NodeWeights
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.fragments import Fragment, resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition


@dataclass(frozen=True)
class Drafted:
    """A draft and what this partition binds to it."""

    draft: Draft
    bound: Bound


class Drafter:
    """Drafts the partitions of one model for one target."""

    def __init__(
        self,
        model: ExportedModel,
        table: Mapping[str, GraphNode],
        target: Target,
        variant: Variant,
    ) -> None:
        self.variant = variant
        self.model = model
        self.table = table
        self.target = target
        self.weights = NodeWeights(model, table, target, variant)
        self._readers: dict[str, set[str]] = {}
        for node in model.nodes:
            if node.kind is NodeKind.VIEW:
                continue
            for source in node.inputs:
                self._readers.setdefault(resolve(source, table), set()).add(node.name)

    def value(self, name: str) -> Value:
        """A value's row; UserError for a type that no kernel or island handles."""
        tensor = self.model.fx[name].meta["val"]
        dtypes = {torch.float32: "f32", torch.int64: "i64"}
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        if kind not in dtypes:
            node = self.table[name]
            raise UserError(
                f"node {name} of module '{node.module}' passes {kind} between kernels; "
                "only float32 and int64 can"
            )
        return Value(name, int(tensor.numel()), dtypes[tensor.dtype])

    def draft(self, partition: Partition) -> Drafted:
        """Places one partition."""
        return _Placing(self, partition).run()

    def readers(self, name: str) -> set[str]:
        """The nodes that read a value, through views."""
        return self._readers.get(name, set())


class _Placing:
    """The state of drafting one partition."""

    def __init__(self, drafter: Drafter, partition: Partition) -> None:
        self.drafter = drafter
        self.weights = drafter.weights
        self.table = drafter.table
        self.fx = drafter.model.fx
        self.panel = drafter.target.panel
        self.partition = partition
        self.bound = bind(partition, drafter.model, drafter.table, drafter.weights, drafter.readers)
        self.words = ArgsTable(self.bound)
        self.rows: dict[str, Row] = {}
        self.draft = Draft()

    def run(self) -> Drafted:
        """Places every fragment in order."""
        draft = self.draft
        draft.counts = "rows" if self.partition.unit == "postlude" else "tokens"
        for word, name in enumerate(self.bound.passed):
            value = self.drafter.value(name)
            stride = value.stride
            if self.table[name].kind in (NodeKind.TOKENS, NodeKind.POSITIONS):
                stride = 1  # they lie in the step message, one next to the other
            self.rows[name] = Row(word, 0, stride, value.dtype)
        if draft.counts == "rows":
            self._gather_inputs()
        islands = iter(range(len(self.bound.islands)))
        lives = self._last_uses()
        for position, fragment in enumerate(self.bound.fragments):
            if position in self.bound.epilogues:
                epilogue = self.bound.epilogues[position]
                draft.items.append(self._place_finished(fragment, epilogue))
                continue  # what the linear reads must last until the epilogue has written
            if position - 1 in self.bound.epilogues:
                linear = draft.items.pop()
                assert isinstance(linear, Linear)
                draft.items.append(replace(linear, epilogue=self._place_island(next(islands))))
            elif fragment.is_kernel:
                draft.items.append(self._place_kernel(fragment))
            else:
                draft.items.append(self._place_island(next(islands)))
            self._release(lives, position)
        draft.scratch = self.words.scratch
        self._number_kv()
        draft.islands = [
            signature(island, self.drafter.model, self.table) for island in self.bound.islands
        ]
        return Drafted(draft, self.bound)

    def _gather_inputs(self) -> None:
        """Compact copies of the wanted rows of every input."""
        for name in self.bound.inputs:
            source = self.rows[name]
            if self.table[name].kind in (NodeKind.TOKENS, NodeKind.POSITIONS):
                raise UserError(
                    f"module '{self.partition.name}' reads token ids or positions after the last "
                    "layer, which has no kernel yet"
                )
            to = self._scratch(name, self.drafter.value(name))
            self.draft.items.append(Gather(source, to))

    def _scratch(self, name: str, value: Value) -> Row:
        """A temporary for a value; remembers where the value now lies."""
        row = Row(self.words.take(value.row_bytes), 0, value.stride, value.dtype)
        self.rows[name] = row
        return row

    def _last_uses(self) -> dict[str, int]:
        """For each value made here: the last fragment that reads it."""
        last: dict[str, int] = {}
        for position, fragment in enumerate(self.bound.fragments):
            for name in fragment.nodes:
                last.setdefault(name, position)
                for source in self.table[name].inputs:
                    last[resolve(source, self.table)] = position
        return last

    def _release(self, lives: Mapping[str, int], position: int) -> None:
        """Frees temporaries none of whose values is read after `position`."""
        held = {row.word for name, row in self.rows.items() if lives.get(name, -1) > position}
        self.words.free_all_but(held)

    def _place_kernel(self, fragment: Fragment) -> Item:
        node = self.fx[fragment.nodes[0]]
        if fx_nodes.is_attention(node):
            return self._place_attention(node)
        if fx_nodes.is_embedding(node, self.drafter.model.parameters):
            parameter = self.weights.table(node)
            return Embedding(
                ids=self._row(fx_nodes.arguments(node)[1]),
                out=self._place(node.name),
                table=self.words.parameter(parameter),
                depth=parameter.parts[0].columns,
                form=parameter.form,
            )
        if fx_nodes.is_top_k(node):
            return self._place_top_k(node)
        if fx_nodes.is_expert_linear(node):
            return self._place_experts(node)
        return self._place_linear(fragment)

    def _row(self, argument: Node) -> Row:
        """Where an argument's value lies."""
        return self.rows[resolve(argument.name, self.table)]

    def _place(self, name: str) -> Row:
        """Where a new value goes: to the partition's output or to a temporary."""
        if name in self.bound.outputs:
            return self.rows[name]
        return self._scratch(name, self.drafter.value(name))

    def _place_linear(self, fragment: Fragment, turns: int = 1) -> Linear:
        weight, bias = self.weights.linears(fragment.nodes, turns)
        panels = [-(-part.rows // self.panel) for part in weight.parts]
        if len(fragment.nodes) == 1:
            out = self._place(fragment.nodes[0])
        else:
            columns = sum(panels) * self.panel
            stride = -(-columns // ROW_PAD) * ROW_PAD
            out = Row(self.words.take(stride * 4), 0, stride, "f32")
            column = 0
            for name, count in zip(fragment.nodes, panels, strict=True):
                self.rows[name] = replace(out, column=column)
                column += count * self.panel
        x = self._row(fx_nodes.linear_row(self.fx[fragment.nodes[0]]))
        bias_word = None if bias is None else self.words.parameter(bias)
        depth = weight.parts[0].columns
        word = self.words.parameter(weight)
        return Linear(x, out, word, bias_word, depth, sum(panels), weight.form, turns)

    def _place_finished(self, fragment: Fragment, epilogue: Epilogue) -> Linear:
        """Linears whose epilogue follows: its parts begin in the first panels."""
        linear = self._place_linear(fragment, epilogue.turns)
        for name, part in epilogue.parts.items():
            self.rows[name] = replace(linear.out, column=part * self.panel)
        return linear

    def _place_experts(self, node: Node) -> ExpertLinear:
        x, choice, *_ = fx_nodes.arguments(node)
        weight, bias = self.weights.experts(node)
        (stack,) = weight.parts
        shared = fx_nodes.value_of(x).numel() == stack.columns
        return ExpertLinear(
            x=self._row(x),
            choice=self._row(choice),
            out=self._place(node.name),
            weight=self.words.parameter(weight),
            bias=None if bias is None else self.words.parameter(bias),
            step=0 if shared else stack.columns,
            choices=fx_nodes.value_of(choice).numel(),
            experts=stack.matrices,
            depth=stack.columns,
            outputs=stack.rows,
            form=weight.form,
        )

    def _place_top_k(self, node: Node) -> TopK:
        x, count = fx_nodes.arguments(node)
        shape = fx_nodes.value_of(x).shape
        rows = fx_nodes.value_of(x).numel() // shape[-1]
        return TopK(self._row(x), self._place(node.name), rows, shape[-1], count)

    def _place_attention(self, node: Node) -> Attention:
        q, k, v, sinks, slopes, scale, window, softcap = fx_nodes.arguments(node)
        _, heads, _, key = fx_nodes.value_of(q).shape
        _, kv_heads, _, value = fx_nodes.value_of(v).shape
        self.draft.kv.append(KvLayer(kv_heads, key, value, self.drafter.variant.cache))
        shape = AttentionShape(
            key,
            value,
            heads // kv_heads,
            softcap != 0.0,
            self.drafter.variant.cache,
            sinks=sinks is not None,
            slopes=slopes is not None,
        )
        sink = loaded_per_head(node, "sinks", NodeKind.PARAMETER, self.table)
        slope = loaded_per_head(node, "slopes", NodeKind.CONSTANT, self.table)
        return Attention(
            q=self._row(q),
            k=self._row(k),
            v=self._row(v),
            out=self._place(node.name),
            shape=shape,
            kv_heads=kv_heads,
            kv=len(self.draft.kv) - 1,  # numbered when the temporaries are known
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=None if sink is None else self.words.parameter(self.weights.plain(sink)),
            slopes=None if slope is None else self.words.constant(slope),
        )

    def _number_kv(self) -> None:
        """KV offsets are the last words of the args table."""
        self.draft.items = [
            replace(item, kv=self.words.kv_offset(item.kv)) if isinstance(item, Attention) else item
            for item in self.draft.items
        ]

    def _place_island(self, index: int) -> IslandCall:
        island = self.bound.islands[index]
        inputs: list[Row | int] = []
        for name in island.inputs:
            kind = self.table[name].kind
            if kind is NodeKind.PARAMETER:
                inputs.append(self.words.parameter(self.weights.plain(name)))
            elif kind is NodeKind.CONSTANT:
                inputs.append(self.words.constant(name))
            else:
                inputs.append(self.rows[name])
        # Outputs are placed before inputs are released: an island never writes what it reads.
        outputs = tuple(self._place(name) for name in island.outputs)
        return IslandCall(index, tuple(inputs), outputs)
