"""Drafting: a partition's fragments on an args table, with temporaries shared by lifetime."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.attention_op import ATTENTION_ARGUMENTS
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS
from buddy_pipeline.compile.islands import Island, cut_free, signature
from buddy_pipeline.compile.kernels.attention_shape import AttentionShape
from buddy_pipeline.compile.manifest import ROW_PAD, KvLayer, Parameter, Value, WeightPart
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.templates import (
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
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.fragments import Fragment, cut, resolve
from buddy_pipeline.partition.graph import GraphNode, NodeKind, Partition


@dataclass(frozen=True)
class Drafted:
    """A draft and what this partition binds to it."""

    draft: Draft
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[str, ...]
    islands: tuple[Island, ...]


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
        self._readers: dict[str, set[str]] = {}
        self._linears = {
            model.parameters[weight.name]: name
            for name, node in model.fx.items()
            if (weight := fx_nodes.linear_weight(node, model.parameters)) is not None
        }
        self._tables = {
            model.parameters[fx_nodes.arguments(node)[0].name]
            for node in model.fx.values()
            if fx_nodes.is_embedding(node, model.parameters)
        }
        self._routers = set(_routers(model, table))
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

    def linear_form(self, name: str) -> str:
        """The weight format of a linear node."""
        node, names = self.model.fx[name], self.model.parameters
        weight = fx_nodes.linear_weight(node, names)
        assert weight is not None
        has_bias, aliases = fx_nodes.linear_bias(node) is not None, names[weight.name]
        if name in self._routers:
            return self.variant.router(aliases)
        return self.variant.linear(aliases, has_bias, is_table=aliases in self._tables)

    def expert_form(self, node: Node) -> str:
        """The weight format of an expert linear node."""
        _, _, weight, bias, _ = fx_nodes.arguments(node)
        if weight.name not in self.model.parameters:
            raise UserError(
                f"experts of module '{self.table[node.name].module}' (node {node.name}) compute"
                " their weights, which has no kernel yet"
            )
        names = self.model.parameters[weight.name]
        return self.variant.linear(names, bias is not None, is_table=False)

    def table_form(self, aliases: tuple[str, ...]) -> str:
        """The weight format of an embedding table: that of a head that shares it, if one does."""
        head = self._linears.get(aliases)
        return self.variant.table(aliases) if head is None else self.linear_form(head)

    def readers(self, name: str) -> set[str]:
        """The nodes that read a value, through views."""
        return self._readers.get(name, set())


class _Placing:
    """The state of drafting one partition."""

    def __init__(self, drafter: Drafter, partition: Partition) -> None:
        self.drafter = drafter
        self.table = drafter.table
        self.fx = drafter.model.fx
        self.panel = drafter.target.panel
        self.partition = partition
        inside = set(partition.nodes)
        self.inputs = self._base_names(n for n in partition.inputs)
        made = [resolve(n, self.table) for n in partition.nodes]
        self.outputs = self._base_names(
            n for n in made if n in inside and drafter.readers(n) - inside
        )
        self.fragments = list(self._fragments())
        self.parameters: list[Parameter] = []
        self.constants: list[str] = []
        self.islands: list[Island] = []
        self._collect()
        self.rows: dict[str, Row] = {}
        self.draft = Draft()
        self.free: list[int] = []  # scratch indices free for reuse

    def _base_names(self, names: Iterable[str]) -> tuple[str, ...]:
        """The values behind views; what is loaded, not computed, needs no passing."""
        bases = dict.fromkeys(resolve(n, self.table) for n in names)
        loaded = (NodeKind.PARAMETER, NodeKind.CONSTANT)
        return tuple(n for n in bases if self.table[n].kind not in loaded)

    def _fragments(self) -> Iterator[Fragment]:
        """The fragments, with linears apart that cannot be one kernel: those whose result leaves
        the partition write to the output directly, the others side by side where their weights are
        of one format."""
        for fragment in cut(self.partition, self.table):
            if not fragment.is_kernel or len(fragment.nodes) == 1:
                yield fragment
                continue
            together: dict[str, list[str]] = {}
            for name in fragment.nodes:
                if name in self.outputs:
                    yield Fragment(True, (name,))
                else:
                    together.setdefault(self.drafter.linear_form(name), []).append(name)
            for names in together.values():
                yield Fragment(True, tuple(names))

    # Words of the args table: inputs, outputs, parameters, constants, scratch, KV offsets. Their
    # numbers are known only when all have been collected, so parameters come first.

    def _collect(self) -> None:
        for fragment in self.fragments:
            if fragment.is_kernel:
                self.parameters += self._kernel_parameters(fragment)
                slopes = self._loaded(self.fx[fragment.nodes[0]], "slopes", NodeKind.CONSTANT)
                if slopes is not None and slopes not in self.constants:
                    self.constants.append(slopes)
                continue
            used = {n for n in fragment.nodes if self.drafter.readers(n) - set(fragment.nodes)}
            island = cut_free(fragment, self.table, used)
            self.islands.append(island)
            for name in island.inputs:
                if self.table[name].kind is NodeKind.PARAMETER:
                    self.parameters.append(self._plain(name))
                elif self.table[name].kind is NodeKind.CONSTANT and name not in self.constants:
                    self.constants.append(name)
        self.parameters = list(dict.fromkeys(self.parameters))

    def _kernel_parameters(self, fragment: Fragment) -> list[Parameter]:
        node = self.fx[fragment.nodes[0]]
        if fx_nodes.is_attention(node):
            sinks = self._loaded(node, "sinks", NodeKind.PARAMETER)
            return [] if sinks is None else [self._plain(sinks)]
        if fx_nodes.is_embedding(node, self.drafter.model.parameters):
            return [self._table_parameter(node)]
        if fx_nodes.is_top_k(node):
            return []
        if fx_nodes.is_expert_linear(node):
            weight, bias = self._expert_parameters(node)
        else:
            weight, bias = self._linear_parameters(fragment)
        return [weight] if bias is None else [weight, bias]

    def _loaded(self, node: Node, argument: str, kind: NodeKind) -> str | None:
        """What an attention reads for each of its heads, by name; None where it reads nothing.

        Raises UserError for values that are computed for each token.
        """
        if not fx_nodes.is_attention(node):
            return None
        given = fx_nodes.arguments(node)[ATTENTION_ARGUMENTS.index(argument)]
        if given is None:
            return None
        name = resolve(given.name, self.table)
        if self.table[name].kind is not kind:
            raise UserError(
                f"node {node.name} of module '{self.table[node.name].module}' attends with "
                f"{argument} that are computed for each token, which has no kernel yet"
            )
        return name

    def _plain(self, name: str) -> Parameter:
        """A parameter as stored, in f32."""
        shape = tuple(self.fx[name].meta["val"].shape)
        aliases = self.drafter.model.parameters[name]
        return Parameter("plain", (WeightPart(aliases, (), shape, False),), 0)

    def _table_parameter(self, node: Node) -> Parameter:
        table: Node = fx_nodes.arguments(node)[0]
        shape = tuple(fx_nodes.value_of(table).shape)
        aliases = self.drafter.model.parameters[table.name]
        form = self.drafter.table_form(aliases)
        part = WeightPart(aliases, (), shape, False)
        _check_rows(part, form)
        return Parameter("panels", (part,), self.panel, form)

    def _linear_parameters(self, fragment: Fragment) -> tuple[Parameter, Parameter | None]:
        """The packed weights of linears side by side, and their biases if any has one."""
        names = self.drafter.model.parameters
        parts = []
        for name in fragment.nodes:
            node = self.fx[name]
            weight = fx_nodes.linear_weight(node, names)
            assert weight is not None
            bias = fx_nodes.linear_bias(node)
            transposed = fx_nodes.is_transposed(node)
            shape = tuple(weight.meta["val"].shape)
            aliases = names[bias.name] if bias is not None else ()
            parts.append(WeightPart(names[weight.name], aliases, shape, transposed))
        weights = tuple(replace(part, bias=()) for part in parts)
        form = self.drafter.linear_form(fragment.nodes[0])
        for part in weights:
            _check_rows(part, form)
        packed = Parameter("panels", weights, self.panel, form)
        if not any(part.bias for part in parts):
            return packed, None
        return packed, Parameter("panel_bias", tuple(parts), self.panel)

    def _expert_parameters(self, node: Node) -> tuple[Parameter, Parameter | None]:
        """The packed weights of all experts, and their biases if they have some."""
        names, form = self.drafter.model.parameters, self.drafter.expert_form(node)
        _, _, weight, bias, transposed = fx_nodes.arguments(node)
        stack = WeightPart(names[weight.name], (), tuple(weight.meta["val"].shape), transposed)
        _check_rows(stack, form)
        packed = Parameter("panels", (stack,), self.panel, form)
        if bias is None:
            return packed, None
        return packed, Parameter("panel_bias", (replace(stack, bias=names[bias.name]),), self.panel)

    def _parameter_word(self, parameter: Parameter) -> int:
        return len(self.inputs) + len(self.outputs) + self.parameters.index(parameter)

    def _constant_word(self, name: str) -> int:
        before = len(self.inputs) + len(self.outputs) + len(self.parameters)
        return before + self.constants.index(name)

    def _scratch_word(self, index: int) -> int:
        before = len(self.inputs) + len(self.outputs) + len(self.parameters)
        return before + len(self.constants) + index

    def run(self) -> Drafted:
        """Places every fragment in order."""
        draft = self.draft
        draft.counts = "rows" if self.partition.unit == "postlude" else "tokens"
        draft.parameters = self.parameters
        for word, name in enumerate((*self.inputs, *self.outputs)):
            value = self.drafter.value(name)
            stride = value.stride
            if self.table[name].kind in (NodeKind.TOKENS, NodeKind.POSITIONS):
                stride = 1  # they lie in the step message, one next to the other
            self.rows[name] = Row(word, 0, stride, value.dtype)
        if draft.counts == "rows":
            self._gather_inputs()
        islands = iter(range(len(self.islands)))
        lives = self._last_uses()
        for position, fragment in enumerate(self.fragments):
            if fragment.is_kernel:
                item = self._place_kernel(fragment)
            else:
                item = self._place_island(next(islands))
            draft.items.append(item)
            self._release(lives, position)
        self._number_kv()
        draft.islands = [
            signature(island, self.drafter.model, self.table) for island in self.islands
        ]
        return Drafted(draft, self.inputs, self.outputs, tuple(self.constants), tuple(self.islands))

    def _gather_inputs(self) -> None:
        """Compact copies of the wanted rows of every input."""
        for name in self.inputs:
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
        row = Row(self._scratch_word(self._take(value.row_bytes)), 0, value.stride, value.dtype)
        self.rows[name] = row
        return row

    def _take(self, row_bytes: int) -> int:
        """The index of a free temporary of this size, or of a new one."""
        fitting = [i for i in self.free if self.draft.scratch[i] == row_bytes]
        if fitting:
            self.free.remove(fitting[0])
            return fitting[0]
        self.draft.scratch.append(row_bytes)
        return len(self.draft.scratch) - 1

    def _last_uses(self) -> dict[str, int]:
        """For each value made here: the last fragment that reads it."""
        last: dict[str, int] = {}
        for position, fragment in enumerate(self.fragments):
            for name in fragment.nodes:
                last.setdefault(name, position)
                for source in self.table[name].inputs:
                    last[resolve(source, self.table)] = position
        return last

    def _release(self, lives: Mapping[str, int], position: int) -> None:
        """Frees temporaries none of whose values is read after `position`."""
        first = self._scratch_word(0)
        held = {row.word for name, row in self.rows.items() if lives.get(name, -1) > position}
        for index in range(len(self.draft.scratch)):
            if first + index not in held and index not in self.free:
                self.free.append(index)

    def _place_kernel(self, fragment: Fragment) -> Item:
        node = self.fx[fragment.nodes[0]]
        if fx_nodes.is_attention(node):
            return self._place_attention(node)
        if fx_nodes.is_embedding(node, self.drafter.model.parameters):
            parameter = self._table_parameter(node)
            return Embedding(
                ids=self._row(fx_nodes.arguments(node)[1]),
                out=self._place(node.name),
                table=self._parameter_word(parameter),
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
        if name in self.outputs:
            return self.rows[name]
        return self._scratch(name, self.drafter.value(name))

    def _place_linear(self, fragment: Fragment) -> Linear:
        weight, bias = self._linear_parameters(fragment)
        panels = [-(-part.rows // self.panel) for part in weight.parts]
        if len(fragment.nodes) == 1:
            out = self._place(fragment.nodes[0])
        else:
            columns = sum(panels) * self.panel
            stride = -(-columns // ROW_PAD) * ROW_PAD
            out = Row(self._scratch_word(self._take(stride * 4)), 0, stride, "f32")
            column = 0
            for name, count in zip(fragment.nodes, panels, strict=True):
                self.rows[name] = replace(out, column=column)
                column += count * self.panel
        x = self._row(fx_nodes.linear_row(self.fx[fragment.nodes[0]]))
        bias_word = None if bias is None else self._parameter_word(bias)
        depth = weight.parts[0].columns
        word = self._parameter_word(weight)
        return Linear(x, out, word, bias_word, depth, sum(panels), weight.form)

    def _place_experts(self, node: Node) -> ExpertLinear:
        x, choice, *_ = fx_nodes.arguments(node)
        weight, bias = self._expert_parameters(node)
        (stack,) = weight.parts
        shared = fx_nodes.value_of(x).numel() == stack.columns
        return ExpertLinear(
            x=self._row(x),
            choice=self._row(choice),
            out=self._place(node.name),
            weight=self._parameter_word(weight),
            bias=None if bias is None else self._parameter_word(bias),
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
        sink_name = self._loaded(node, "sinks", NodeKind.PARAMETER)
        slope_name = self._loaded(node, "slopes", NodeKind.CONSTANT)
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
            sinks=None if sink_name is None else self._parameter_word(self._plain(sink_name)),
            slopes=None if slope_name is None else self._constant_word(slope_name),
        )

    def _number_kv(self) -> None:
        """KV offsets are the last words of the args table."""
        first = self._scratch_word(len(self.draft.scratch))
        self.draft.items = [
            replace(item, kv=first + item.kv) if isinstance(item, Attention) else item
            for item in self.draft.items
        ]

    def _place_island(self, index: int) -> IslandCall:
        island = self.islands[index]
        inputs: list[Row | int] = []
        for name in island.inputs:
            kind = self.table[name].kind
            if kind is NodeKind.PARAMETER:
                inputs.append(self._parameter_word(self._plain(name)))
            elif kind is NodeKind.CONSTANT:
                inputs.append(self._constant_word(name))
            else:
                inputs.append(self.rows[name])
        # Outputs are placed before inputs are released: an island never writes what it reads.
        outputs = tuple(self._place(name) for name in island.outputs)
        return IslandCall(index, tuple(inputs), outputs)


def _routers(model: ExportedModel, table: Mapping[str, GraphNode]) -> Iterator[str]:
    """The linears from which a choice of the greatest is computed, by arithmetic alone."""
    waiting = [name for name, node in model.fx.items() if fx_nodes.is_top_k(node)]
    seen = set(waiting)
    while waiting:
        for source in table[waiting.pop()].inputs:
            if source in seen:
                continue
            seen.add(source)
            if fx_nodes.linear_weight(model.fx[source], model.parameters) is not None:
                yield source
            elif table[source].kind in (NodeKind.VIEW, NodeKind.COMPUTE):
                waiting.append(source)


def _check_rows(part: WeightPart, form: str) -> None:
    """Raises UserError for a matrix whose rows a format cannot hold."""
    rows = ROW_FORMATS.get(weight_format(form).source)
    if rows is None:
        return
    try:
        rows.check_depth(part.columns)
    except ValueError as error:
        raise UserError(f"tensor '{part.weight[0]}' {error}: use another variant") from None
