"""A spec resolved: the checkpoint it means, its variant, its context, its layers by rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy_pipeline.compile.granularity import COARSE_TEMPLATES, Granularity
from buddy_pipeline.launcher.model_source import check_element_count, model_path
from buddy_pipeline.launcher.settings import ModelSettings
from buddy_pipeline.launcher.spec import Spec, load_spec
from buddy_pipeline.launcher.variants import compiled_variant
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
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
#: Context where neither the spec nor the model names one.
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class Model:
    """What a spec and the command line mean together."""

    spec: Spec
    checkpoint: Checkpoint
    variant: str
    context: int
    """Positions of one sequence."""
    layers: int
    granularity: Granularity = COARSE_TEMPLATES
    """How the graph is cut, and what like parts share."""
    prebuilt: Prebuilt | None = None
    """Where code and weights come from instead of being made."""
    split: tuple[int, ...] | None = None
    """Layers of each rank, where what was built is for one split only."""


@dataclass(frozen=True)
class ResolvedModel:
    """What is known of a model without its weights."""

    spec: Spec
    path: Path
    config: dict[str, Any]
    variant: str
    context: int
    layers: int


def resolve_model(settings: ModelSettings) -> ResolvedModel:
    """Resolves the spec; of a Hugging Face directory only config.json must be there."""
    from buddy_pipeline.ranks.checkpoint import read_config

    spec = load_spec(settings.spec)
    variant = compiled_variant(settings.variant or spec.variant).name
    path = model_path(spec, settings.local_model)
    config = read_config(path)
    return ResolvedModel(spec, path, config, variant, _context(spec, config), _layers(config))


def open_model(settings: ModelSettings) -> Model:
    """Resolves the spec and opens the checkpoint; UserError for whatever does not fit."""
    from buddy_pipeline.ranks.checkpoint import open_checkpoint

    spec = load_spec(settings.spec)
    variant = compiled_variant(settings.variant or spec.variant).name
    checkpoint = open_checkpoint(model_path(spec, settings.local_model))
    check_element_count(spec, checkpoint)
    return Model(
        spec=spec,
        checkpoint=checkpoint,
        variant=variant,
        context=_context(spec, checkpoint.config),
        layers=_layer_count(checkpoint),
    )


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
            f"{checkpoint.path}: its configuration has {layers} layers, but the weights are only"
            f" {len(checkpoint.tensors)} tensors; the two do not belong together"
        )
    return layers


def _layers(config: dict[str, Any]) -> int:
    layers = first_number(config, _LAYERS)
    if layers is None:
        raise UserError(
            f"the model's config names no number of layers: add {_LAYERS[0]} to its config.json"
        )
    return layers


def first_number(config: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these entries that is a positive whole number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
