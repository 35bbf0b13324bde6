"""The weights of a model's kernel nodes: in which format each is packed, and which together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from buddy_pipeline.compile import fx_nodes
from buddy_pipeline.compile.export import ExportedModel
from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.formats.quantised_rows import ROW_FORMATS
from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.compile.target import Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.partition.graph import GraphNode, NodeKind


class NodeWeights:
    """The packed parameters that nodes of one model read, for one target and variant."""

    def __init__(
        self,
        model: ExportedModel,
        table: Mapping[str, GraphNode],
        target: Target,
        variant: Variant,
    ) -> None:
        self._model = model
        self._names = model.parameters
        self._table = table
        self._variant = variant
        self.panel = target.panel
        self._linears = {
            self._names[weight.name]: name
            for name, node in model.fx.items()
            if (weight := fx_nodes.linear_weight(node, self._names)) is not None
        }
        self._tables = {
            self._names[fx_nodes.arguments(node)[0].name]
            for node in model.fx.values()
            if fx_nodes.is_embedding(node, self._names)
        }
        self._routers = set(_routers(model, table))

    def linear_form(self, name: str) -> str:
        """The weight format of a linear node."""
        node = self._model.fx[name]
        weight = fx_nodes.linear_weight(node, self._names)
        assert weight is not None
        has_bias, aliases = fx_nodes.linear_bias(node) is not None, self._names[weight.name]
        if name in self._routers:
            return self._variant.router(aliases)
        return self._variant.linear(aliases, has_bias, is_table=aliases in self._tables)

    def plain(self, name: str) -> Parameter:
        """A parameter as stored, in f32."""
        shape = tuple(self._model.fx[name].meta["val"].shape)
        return Parameter("plain", (WeightPart(self._names[name], (), shape, False),), 0)

    def table(self, node: Node) -> Parameter:
        """The packed table of an embedding node."""
        table: Node = fx_nodes.arguments(node)[0]
        shape = tuple(fx_nodes.value_of(table).shape)
        aliases = self._names[table.name]
        form = self._table_form(aliases)
        part = WeightPart(aliases, (), shape, False)
        _check_rows(part, form)
        return Parameter("panels", (part,), self.panel, form)

    def linears(self, nodes: Sequence[str], turns: int) -> tuple[Parameter, Parameter | None]:
        """The packed weights of linears side by side, and their biases if any has one; see
        `Parameter` for panels that take turns."""
        parts = []
        for name in nodes:
            node = self._model.fx[name]
            weight = fx_nodes.linear_weight(node, self._names)
            assert weight is not None
            bias = fx_nodes.linear_bias(node)
            transposed = fx_nodes.is_transposed(node)
            shape = tuple(weight.meta["val"].shape)
            aliases = self._names[bias.name] if bias is not None else ()
            parts.append(WeightPart(self._names[weight.name], aliases, shape, transposed))
        weights = tuple(replace(part, bias=()) for part in parts)
        form = self.linear_form(nodes[0])
        for part in weights:
            _check_rows(part, form)
        packed = Parameter("panels", weights, self.panel, form, turns)
        if not any(part.bias for part in parts):
            return packed, None
        return packed, Parameter("panel_bias", tuple(parts), self.panel, turns=turns)

    def experts(self, node: Node) -> tuple[Parameter, Parameter | None]:
        """The packed weights of all experts, and their biases if they have some."""
        _, _, weight, bias, transposed = fx_nodes.arguments(node)
        if weight.name not in self._names:
            raise UserError(
                f"experts of module '{self._table[node.name].module}' (node {node.name}) compute"
                " their weights, which has no kernel yet"
            )
        names = self._names[weight.name]
        form = self._variant.linear(names, bias is not None, is_table=False)
        stack = WeightPart(names, (), tuple(weight.meta["val"].shape), transposed)
        _check_rows(stack, form)
        packed = Parameter("panels", (stack,), self.panel, form)
        if bias is None:
            return packed, None
        biases = (replace(stack, bias=self._names[bias.name]),)
        return packed, Parameter("panel_bias", biases, self.panel)

    def _table_form(self, aliases: tuple[str, ...]) -> str:
        """The weight format of an embedding table: that of a head that shares it, if one does."""
        head = self._linears.get(aliases)
        return self._variant.table(aliases) if head is None else self.linear_form(head)


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
