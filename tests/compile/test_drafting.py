"""Drafts: one template for like layers, words of the args table, and temporaries that are reused
only when nobody needs them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

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
from buddy_pipeline.compile.drafting import Drafted, Drafter
from buddy_pipeline.compile.target import Target, named_target
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.partition.fragments import cut, resolve
from buddy_pipeline.partition.graph import NodeKind, Partition
from tests.checkpoints import FAMILIES, MIXTURES
from tests.compile.models import Model, model

TARGETS = [named_target(n) for n in ("x86-64-v4", "x86-64-v3", "aarch64")]
on_each_family = pytest.mark.parametrize("family", FAMILIES)
on_each_kind = pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
on_each_mixture = pytest.mark.parametrize("family", MIXTURES)


def layer_names(family: str) -> list[str]:
    drafts = model(family).drafts(TARGETS[0])
    return [drafts[f"layer{i}"].draft.name() for i in range(3)]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gemma2"])
def test_layers_of_one_structure_share_a_template(family: str) -> None:
    assert len(set(layer_names(family))) == 1


def test_gemma2_has_two_kinds_of_layers_in_turn() -> None:
    first, second, third = layer_names("gemma2")
    assert first == third != second


def test_sizes_window_and_variant_make_other_templates() -> None:
    base = model("mistral").drafts(TARGETS[0])["layer0"].draft.name()
    wider = Model("mistral", sliding_window=14).drafts(TARGETS[0])["layer0"].draft.name()
    larger = Model("mistral", intermediate_size=95).drafts(TARGETS[0])["layer0"].draft.name()
    half = model("mistral").drafts(TARGETS[0], "bf16")["layer0"].draft.name()
    assert len({base, wider, larger, half}) == 4


@on_each_family
def test_fragments_are_few(family: str) -> None:
    """Norm, one pass for q, k and v, rotation, attention, output, norm, one pass for gate and up
    with their product, down with the residual; Gemma norms before it adds."""
    items = model(family).drafts(TARGETS[0])["layer1"].draft.items
    kinds = [type(item) for item in items]
    around = [IslandCall, Linear, IslandCall, Attention, Linear]
    normed = family == "gemma2"
    assert kinds == [*around, IslandCall, Linear, Linear, *[IslandCall] * normed]
    epilogues = [i.epilogue is not None for i in items if isinstance(i, Linear)]
    assert epilogues == [False, False, True, not normed]


def test_a_head_caps_its_logits_as_it_makes_them() -> None:
    *_, head = model("gemma2").drafts(TARGETS[0])["postlude"].draft.items
    assert isinstance(head, Linear) and head.epilogue is not None


@pytest.mark.parametrize(("width", "joined"), [(96, True), (100, False)])
def test_halves_of_one_matrix_are_joined_where_they_end_with_a_panel(
    width: int, joined: bool
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    phi = Model("phi3", **sizes, intermediate_size=width, pad_token_id=None)
    drafted = phi.drafts(TARGETS[0])["layer1"]
    linears = [item for item in drafted.draft.items if isinstance(item, Linear)]
    assert [item.epilogue is not None for item in linears] == [False, False, joined, True]
    assert linears[2].turns == 1 + joined
    weights = [p for p in drafted.bound.parameters if "gate_up" in p.parts[0].weight[0]]
    assert [p.turns for p in weights] == [1 + joined]


def test_parts_of_a_matrix_that_others_read_are_no_epilogue() -> None:
    """GPT-2's query, key and value: attention reads them, whole panels or not."""
    gpt = Model("gpt2", n_embd=96, n_inner=32)
    (first, *_) = (
        item for item in gpt.drafts(TARGETS[0])["layer1"].draft.items if isinstance(item, Linear)
    )
    assert first.epilogue is None and first.turns == 1


def test_a_part_that_leaves_its_partition_is_written() -> None:
    """A split of the user's own may end between the parts of a matrix and who reads them."""
    gpt = Model("gpt2", n_embd=96, n_inner=32)
    (layer,) = (p for p in gpt.partitions if p.name == "layer1")
    end = max(n for n, name in enumerate(layer.nodes) if name.startswith("getitem")) + 1
    piece = replace(layer, nodes=layer.nodes[:end])
    drafter = Drafter(gpt.exported, gpt.table, TARGETS[0], VARIANTS["f32"])
    drafted = drafter.draft(piece)
    outputs = range(len(drafted.bound.inputs), len(drafted.bound.passed))
    assert len(outputs) == 3
    written = {row.word for item in single_steps(drafted.draft) for row in writes(item)}
    assert written.issuperset(outputs)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_others_read_too_or_rows_norm_is_no_epilogue(family: str) -> None:
    """Of partitions of one module the residual that leaves one is added in another."""
    of = model(family)
    for drafted in of.drafts(TARGETS[0]).values():
        for number in drafted.bound.epilogues:
            inside = set(drafted.bound.fragments[number + 1].nodes)
            for name in drafted.bound.fragments[number].nodes:
                readers = {
                    node.name
                    for node in of.exported.nodes
                    if node.kind is not NodeKind.VIEW
                    and name in {resolve(source, of.table) for source in node.inputs}
                }
                assert readers and readers <= inside


@on_each_mixture
def test_only_experts_and_their_choice_come_in_place_of_a_feed_forward(family: str) -> None:
    """Router, softmax, choice and the experts' first matrix; gate; their second; sum."""
    items = model(family).drafts(TARGETS[0])["layer1"].draft.items
    kinds = [type(item) for item in items]
    around = [IslandCall, Linear, IslandCall, Attention, Linear, IslandCall]
    ahead = [Linear, IslandCall, TopK, ExpertLinear, IslandCall, ExpertLinear, IslandCall]
    assert kinds == [*around, *ahead]


@on_each_mixture
def test_routers_are_not_quantised_but_experts_are(family: str) -> None:
    bound = model(family).drafts(TARGETS[0], "w8a16")["layer1"].bound
    forms = {part.weight[0]: p.form for p in bound.parameters for part in p.parts}
    experts = {form for name, form in forms.items() if ".experts." in name}
    assert experts == {"w8a16"}
    assert forms["model.layers.1.mlp.gate.weight"] == "bf16"


def reads(item: Item) -> list[Row]:
    if isinstance(item, Gather):
        return [item.source]
    if isinstance(item, Linear | TopK):
        return [item.x]
    if isinstance(item, ExpertLinear):
        return [item.x, item.choice]
    if isinstance(item, Attention):
        return [item.q, item.k, item.v]
    if isinstance(item, Embedding):
        return [item.ids]
    return [row for row in item.inputs if isinstance(row, Row)]


def writes(item: Item) -> list[Row]:
    if isinstance(item, Gather):
        return [item.to]
    if isinstance(item, IslandCall):
        return list(item.outputs)
    return [item.out]


def single_steps(draft: Draft) -> Iterator[Item]:
    """The items, with the epilogues of linears as items of their own."""
    for item in draft.items:
        yield item
        if isinstance(item, Linear) and item.epilogue is not None:
            yield item.epilogue


def fragments(of: Model, partition: Partition, drafted: Drafted) -> list[tuple[str, ...]]:
    """The values that each item but gathers makes: linears of results that leave stand alone."""
    found = []
    for fragment in cut(partition, of.table):
        leaving = [n for n in fragment.nodes if n in drafted.bound.outputs]
        if fragment.is_kernel and len(fragment.nodes) > 1 and leaving:
            found += [(name,) for name in leaving]
            rest = tuple(n for n in fragment.nodes if n not in leaving)
            found += [rest] if rest else []
        else:
            found.append(fragment.nodes)
    return found


def values_read(of: Model, drafted: Drafted, item: Item, nodes: tuple[str, ...]) -> list[str]:
    """The values that an item must find where it reads, in the order of `reads`."""
    if isinstance(item, IslandCall):
        inputs = zip(drafted.bound.islands[item.source].inputs, item.inputs, strict=True)
        return [name for name, place in inputs if isinstance(place, Row)]
    activations = [
        resolve(name, of.table)
        for name in of.table[nodes[0]].inputs
        if of.table[name].kind is not NodeKind.PARAMETER
    ]
    count = {Attention: 3, ExpertLinear: 2}.get(type(item), 1)
    return activations[:count]


def values_written(
    of: Model, drafted: Drafted, item: Item, nodes: tuple[str, ...], panel: int
) -> dict[tuple[int, int], str]:
    """Where an item leaves which value: (word, column) to name."""
    if isinstance(item, IslandCall):
        names = drafted.bound.islands[item.source].outputs
        return {(r.word, r.column): n for r, n in zip(item.outputs, names, strict=True)}
    places, column = {}, 0
    for name in nodes:
        places[item.out.word, item.out.column + column] = name
        outputs = of.exported.fx[name].meta["val"].numel()
        takes_turns = isinstance(item, Linear) and item.epilogue is not None
        column += panel if takes_turns else -(-outputs // panel) * panel
    return places


@on_each_kind
def test_an_epilogue_writes_nothing_that_its_linear_still_reads(family: str) -> None:
    """Another thread may not have read its input yet."""
    for drafted in model(family).drafts(TARGETS[0]).values():
        for item in drafted.draft.items:
            if isinstance(item, Linear) and item.epilogue is not None:
                written = {row.word for row in item.epilogue.outputs}
                assert not written & {item.x.word, item.out.word}


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.cpu)
@on_each_kind
def test_whoever_reads_a_value_finds_it_where_it_looks(family: str, target: Target) -> None:
    """Runs every draft on places instead of numbers: no temporary is reused too early."""
    of = model(family)
    drafts = of.drafts(target)
    for partition in of.partitions:
        drafted = drafts[partition.name]
        holds = {(word, 0): name for word, name in enumerate(drafted.bound.inputs)}
        makes = iter(fragments(of, partition, drafted))
        for item in single_steps(drafted.draft):
            if isinstance(item, Gather):
                holds[item.to.word, 0] = holds[item.source.word, 0]
                continue
            nodes = next(makes)
            expected = values_read(of, drafted, item, nodes)
            assert [holds.get((r.word, r.column)) for r in reads(item)] == expected
            assert not {r.word for r in reads(item)} & {r.word for r in writes(item)}
            overwritten = {row.word for row in writes(item)}
            holds = {place: n for place, n in holds.items() if place[0] not in overwritten}
            holds |= values_written(of, drafted, item, nodes, target.panel)
        assert next(makes, None) is None
        for word, name in enumerate(drafted.bound.outputs, len(drafted.bound.inputs)):
            assert holds[word, 0] == name


@on_each_kind
def test_words_of_a_table_do_not_overlap(family: str) -> None:
    """Inputs, outputs, parameters, constants, scratch, KV offsets, in this order."""
    for drafted in model(family).drafts(TARGETS[0]).values():
        draft, bound = drafted.draft, drafted.bound
        first = len(bound.passed)
        after_parameters = first + len(bound.parameters)
        scratch = after_parameters + len(bound.constants)
        end = scratch + len(draft.scratch)
        for item in single_steps(draft):
            for row in (*reads(item), *writes(item)):
                assert row.word < first or scratch <= row.word < end
            if isinstance(item, Linear | ExpertLinear):
                assert first <= item.weight < after_parameters
                assert item.bias is None or first <= item.bias < after_parameters
            if isinstance(item, Attention):
                assert end <= item.kv < end + len(draft.kv)
            if isinstance(item, IslandCall):
                words = [word for word in item.inputs if isinstance(word, int)]
                assert all(first <= word < scratch for word in words)


@on_each_kind
def test_rows_fit_their_temporaries(family: str) -> None:
    for drafted in model(family).drafts(TARGETS[0]).values():
        draft, bound = drafted.draft, drafted.bound
        scratch = len(bound.passed) + len(bound.parameters) + len(bound.constants)
        for item in single_steps(draft):
            for row in (*reads(item), *writes(item)):
                if row.word >= scratch:
                    size = 8 if row.dtype == "i64" else 4
                    assert row.stride * size == draft.scratch[row.word - scratch]
                    assert row.column < row.stride


def test_only_the_postlude_works_on_the_rows_that_are_asked_for() -> None:
    drafts = model("llama").drafts(TARGETS[0])
    assert {name for name, d in drafts.items() if d.draft.counts == "rows"} == {"postlude"}
    assert isinstance(drafts["postlude"].draft.items[0], Gather)


def test_equal_signatures_mean_equal_drafts() -> None:
    one, two = Draft(), Draft()
    assert one.signature() == two.signature() and one.name() == two.name()
    two.scratch.append(64)
    assert one.name() != two.name()
