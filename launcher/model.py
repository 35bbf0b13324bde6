"""A spec resolved: the checkpoint it means, its variant, its context, its layers by rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy_pipeline.compile.formats import weight_format
from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.launcher.config_numbers import first_number
from buddy_pipeline.launcher.console import print_warning
from buddy_pipeline.launcher.element_counts import (
    check_choice,
    check_float_total,
    chosen_counts,
)
from buddy_pipeline.launcher.model_source import model_path
from buddy_pipeline.launcher.run_defaults import RunDefaults, spec_defaults
from buddy_pipeline.launcher.settings import ModelSettings
from buddy_pipeline.launcher.spec import Spec, load_spec
from buddy_pipeline.launcher.stored_formats import as_stored
from buddy_pipeline.launcher.variants import known_cache_type, known_variant
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError

if TYPE_CHECKING:
    from buddy_pipeline.launcher.prebuilt import Prebuilt
    from buddy_pipeline.ranks.checkpoint import Checkpoint

#: Names that configurations give to the number of positions a model was trained on.
_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "max_target_positions",
)
#: Names of the number of layers; of a model with an encoder only the decoder's count.
_LAYERS = (
    "decoder_layers",
    "num_decoder_layers",
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
)
#: Context where neither the spec nor the model names one.
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Model:
    """What a spec and the command line mean together."""

    checkpoint: Checkpoint
    formats: Variant
    context: int
    """Positions of one sequence."""
    layers: int
    defaults: RunDefaults
    granularity: Granularity = COARSE_TEMPLATES
    """How the graph is cut, and what like parts share."""
    prebuilt: Prebuilt | None = None
    """Where code and weights come from instead of being made."""
    split: tuple[int, ...] | None = None
    """Layers of each rank, where what was built is for one split only."""

    @property
    def variant(self) -> str:
        """The variant's name."""
        return self.formats.name


@dataclass(frozen=True)
class ResolvedModel:
    """What is known of a model without reading its weights."""

    path: Path
    config: dict[str, Any]
    formats: Variant
    context: int
    layers: int
    defaults: RunDefaults


def resolve_model(settings: ModelSettings) -> ResolvedModel:
    """Resolves the spec; of a Hugging Face directory only config.json must be there.

    Where the weights are there too they have a say, as in `open_model`.
    """
    from buddy_pipeline.ranks.checkpoint import has_weights, read_config

    spec = load_spec(settings.spec)
    path = model_path(spec, settings.local_model)
    if has_weights(path):
        model = open_model(settings)
        found = model.checkpoint.config
        return ResolvedModel(
            path, found, model.formats, model.context, model.layers, model.defaults
        )
    config = read_config(path)
    asked = spec.variant if settings.variant is None else settings.variant
    formats = _with_cache(known_variant(asked), settings, spec)
    context = _context(spec, config)
    defaults = spec_defaults(spec, context)
    return ResolvedModel(path, config, formats, context, _layers(config), defaults)


def open_model(settings: ModelSettings) -> Model:
    """Resolves the spec and opens the checkpoint; UserError for whatever does not fit."""
    from buddy_pipeline.ranks.checkpoint import open_checkpoint

    spec = load_spec(settings.spec)
    checkpoint = open_checkpoint(model_path(spec, settings.local_model))
    formats = _formats(settings, spec, checkpoint)
    context = _context(spec, checkpoint.config)
    return Model(
        checkpoint=checkpoint,
        formats=formats,
        context=context,
        layers=_layer_count(checkpoint),
        defaults=spec_defaults(spec, context),
    )


def _formats(settings: ModelSettings, spec: Spec, checkpoint: Checkpoint) -> Variant:
    """The variant asked for, on the command line, by a directory that is quantised already, or by
    the spec; and which linears it quantises."""
    done = checkpoint.quantisation
    asked = settings.variant
    if asked is None:
        asked = done.variant if done else spec.variant
    formats = as_stored(known_variant(asked), checkpoint, settings.exact)
    if spec.weights_override is not None:
        own = known_variant(spec.variant)
        if own.quantised:
            counts, warning = chosen_counts(spec, own, checkpoint)
            if done is not None:
                check_choice(spec, counts, own, checkpoint)
            formats = replace(formats, biased=counts.biased)
            if warning:
                print_warning(warning)
        else:
            check_float_total(spec, checkpoint)
    if done is not None:
        formats = _as_quantised(formats, known_variant(done.variant), done.biased, checkpoint)
    return _with_cache(formats, settings, spec)


def _with_cache(formats: Variant, settings: ModelSettings, spec: Spec) -> Variant:
    """The formats with the cache's type that was asked for."""
    cache = settings.kv_cache_dtype
    if cache is None:
        cache = spec.kv_cache_dtype
    return formats if cache is None else replace(formats, cache=known_cache_type(cache))


def _as_quantised(formats: Variant, done: Variant, biased: bool, checkpoint: Checkpoint) -> Variant:
    """A variant on weights that are quantised already, which decides what is."""
    from buddy_pipeline.ranks.checkpoint.shown import shown

    assert checkpoint.quantisation is not None
    own = {weight_format(name).source for name in (done.weights, done.table_and_head)}
    for name, tensor in checkpoint.quantisation.tensors.items():
        if tensor.form not in own:
            raise UserError(
                f"{checkpoint.path} says that it is quantised as {done.name}, but its tensor "
                f"{shown(name)} is in {tensor.form}: quantize the original model again"
            )
    if not formats.quantised:
        return formats
    if weight_format(formats.weights).source != weight_format(done.weights).source:
        raise UserError(
            f"{checkpoint.path} is quantised as {done.name}, and {formats.name} would quantise it "
            f"once more: use --variant {done.name} or the original model"
        )
    return replace(formats, biased=biased)


def _context(spec: Spec, config: dict[str, Any]) -> int:
    """The spec's context, or the model's."""
    trained = first_number(config, _POSITIONS)
    if spec.max_token_len is None:
        return trained or _DEFAULT_CONTEXT
    if trained is not None and spec.max_token_len > trained:
        raise UserError(
            f"spec {spec.name}: max_token_len is {spec.max_token_len}, but the model has "
            f"{trained} positions: use at most that"
        )
    return spec.max_token_len


def _layer_count(checkpoint: Checkpoint) -> int:
    """The number of layers, checked before a graph of that many is made."""
    layers = _layers(checkpoint.config)
    if layers > len(checkpoint.tensors):
        raise UserError(
            f"{checkpoint.path}: its configuration has {counted(layers, 'layer')}, but the weights"
            f" are only {counted(len(checkpoint.tensors), 'tensor')}; the two do not belong"
            " together"
        )
    return layers


def _layers(config: dict[str, Any]) -> int:
    layers = first_number(config, _LAYERS)
    if layers is None:
        raise UserError(
            "the model's config names no number of layers: add num_hidden_layers to its config.json"
        )
    return layers
