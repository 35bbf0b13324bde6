"""Plans: sources by content key, templates that are shared, everything bound."""

import re
from collections import Counter
from collections.abc import Mapping

import pytest

from buddy_pipeline.compile.early_sources import early_sources
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.kernels.driver import DRIVER
from buddy_pipeline.compile.planner import make_plan
from buddy_pipeline.compile.source import Source
from buddy_pipeline.compile.target import host_target, named_target
from buddy_pipeline.compile.variant import VARIANTS
from tests.checkpoints import FAMILIES, MIXTURES, tiny_config
from tests.compile.models import model, plan, planned

on_each_family = pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])


@on_each_family
def test_every_object_has_a_source_and_every_source_an_object(family: str) -> None:
    made, sources = planned(family)
    assert set(made.objects(made.partitions)) == set(sources)


@on_each_family
def test_partitions_bind_as_many_words_as_their_template_has(family: str) -> None:
    made = plan(family)
    for partition in made.partitions:
        assert partition.template in made.templates
        for name in (*partition.inputs, *partition.outputs):
            assert name in made.values
        assert set(partition.constants) <= set(made.constants)


@on_each_family
def test_layers_are_consecutive_and_one_template_serves_like_ones(family: str) -> None:
    made = plan(family)
    layers = [p for p in made.partitions if p.unit.isdigit()]
    assert [p.unit for p in layers] == ["0", "1", "2"] and made.layers == 3
    assert len({p.template for p in layers}) == (2 if family == "gemma2" else 1)
    assert all(len(p.kv) == 1 for p in layers)


@on_each_family
def test_the_result_is_the_logits(family: str) -> None:
    made = plan(family)
    assert made.vocab_size == 261 and made.result in made.partitions[-1].outputs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_variants_share_nothing_but_what_has_no_weights(family: str) -> None:
    plain, half = planned(family)[1], planned(family, "f16")[1]
    shared = {plain[key].symbols[0] for key in plain.keys() & half.keys()}
    assert "bp_run_stage" in shared
    assert not any("linear" in s or "attention" in s or "embedding" in s for s in shared)
    assert {p.form for q in planned(family, "f16")[0].partitions for p in q.parameters} <= {
        "f16",
        "f32",
    }


def test_a_plan_is_the_same_every_time() -> None:
    made, sources = planned("llama")
    again = planned.__wrapped__("llama")
    assert (made.to_json(), list(sources)) == (again[0].to_json(), list(again[1]))


def test_models_that_differ_in_depth_alone_share_all_objects() -> None:
    deeper, sources = planned("llama", num_hidden_layers=7)
    assert set(sources) == set(planned("llama")[1])
    assert deeper.layers == 7


def test_what_decides_a_source_is_part_of_its_key() -> None:
    target, versions = named_target("x86-64-v3"), {"llvmlite": "1"}
    base = Source("name", ("symbol",), "module", (("island", "text"),))
    key = base.key(target, versions)
    others = [
        Source("name", ("symbol",), "module2", base.islands).key(target, versions),
        Source("name", ("symbol2",), "module", base.islands).key(target, versions),
        Source("name", ("symbol",), "module", (("island", "text2"),)).key(target, versions),
        base.key(named_target("x86-64-v4"), versions),
        base.key(target, {"llvmlite": "2"}),
    ]
    assert len({key, *others}) == 6
    assert Source("name", ("symbol",), "module", base.islands).key(target, versions) == key


@on_each_family
def test_a_whole_graph_with_shared_kernels_is_one_object_beside_them(family: str) -> None:
    whole, sources = planned(family, granularity=Granularity("coarse", Sharing.KERNELS))
    shared, _ = planned(family)
    graph = next(source for source in sources.values() if source.name == "whole_graph")
    assert set(graph.symbols) == {t.symbol for t in whole.templates.values()}
    assert len(whole.templates) == len(whole.partitions) == len(shared.partitions)
    assert {t.objects[0] for t in whole.templates.values()} == {
        key for key, source in sources.items() if source is graph
    }


def test_in_a_whole_graph_every_node_has_its_own_code() -> None:
    """As a compiler without templates would emit it: no function is called from two places."""
    _, sources = planned("qwen2", granularity=Granularity("coarse", Sharing.WHOLE_GRAPH))
    assert {source.name for source in sources.values()} == {"whole_graph", DRIVER}
    (graph,) = (source for source in sources.values() if source.name == "whole_graph")
    calls = Counter(re.findall(r"func\.call @(\w+_bp_\w+)\(", graph.module))
    kernels = [name for name in calls if "_item" in name]
    kinds = Counter(re.sub(r"_k\d.*", "", name.split("_bp_")[1]) for name in kernels)
    # Three layers of q, k, v in one, o, gate and up in one, down; and the head.
    assert kinds == {"linear_f32": 3 * 4 + 1, "attention_f32": 3, "embedding_f32": 1}
    assert all(calls[name] == 1 for name in kernels)
    lines = graph.module.splitlines()
    defined = [m[1] for line in lines if (m := re.match(r"func\.func .*@(\w+)\(.*\{$", line))]
    assert len(defined) == len(set(defined)) and set(kernels) < set(defined)


@on_each_family
def test_finer_strategies_have_more_partitions_and_still_few_templates(family: str) -> None:
    counts = [
        len(planned(family, granularity=Granularity(strategy))[0].partitions)
        for strategy in ("coarse", "block", "fine")
    ]
    assert counts == sorted(set(counts))
    fine = planned(family, granularity=Granularity("fine"))[0]
    like = [p.template for p in fine.partitions if p.unit == "0"]
    others = [p.template for p in fine.partitions if p.unit == "2"]
    assert like == others


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_built_early_is_what_the_plan_has(variant: str) -> None:
    early = early_sources(VARIANTS[variant], host_target(), Sharing.TEMPLATES)
    # Rows that groups of 128 divide.
    sizes = {"hidden_size": 128, "intermediate_size": 128} if variant.startswith("w4") else {}
    sources = planned("llama", variant, num_attention_heads=2, **sizes)[1]
    assert {s.key(host_target(), {"compiler": "1"}) for s in early} <= sources.keys()


def test_sources_are_announced_with_every_unit_that_needs_them() -> None:
    exported, config = model("gemma2").exported, tiny_config("gemma2")
    announced: dict[str, set[str]] = {}

    def ready(unit: str, sources: Mapping[str, Source]) -> None:
        announced.setdefault(unit, set()).update(sources)

    versions = {"compiler": "1"}
    made = make_plan(
        "key", exported, config, VARIANTS["f32"], Granularity(), host_target(), versions, ready
    ).plan
    for unit, keys in announced.items():
        partitions = tuple(p for p in made.partitions if p.unit == unit)
        assert keys == set(made.objects(partitions)) - {made.driver}
    assert announced.keys() == {p.unit for p in made.partitions}
