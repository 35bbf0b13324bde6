"""The build configuration: everything that a spec leaves to be found out, written down.

`gen-config` makes it, the other stages read it, so that they agree without reading the spec again.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from buddy_pipeline.compile.build_directory import BuildDirectory
from buddy_pipeline.compile.formats import FORMATS
from buddy_pipeline.compile.granularity import Granularity, Sharing
from buddy_pipeline.compile.target import TARGET_VALUES, Target
from buddy_pipeline.compile.variant import Variant
from buddy_pipeline.launcher.json_fields import check_keys, read_fields, read_object, read_value
from buddy_pipeline.launcher.model import resolve_model
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.launcher.run_defaults import RunDefaults, read_defaults
from buddy_pipeline.launcher.settings import BuildSettings
from buddy_pipeline.launcher.variants import known_cache_type
from buddy_pipeline.partition.errors import UserError

#: Raised whenever the meaning of a field changes.
FORMAT_VERSION = 2
#: Sizes that configurations give, in the order in which they are shown.
_SHAPES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
#: Keys of the file; `shapes` and `token_counts` are for its reader only.
_KEYS = frozenset(
    {
        *("format", "spec", "model_path", "formats", "context", "layers", "strategy", "sharing"),
        *("shapes", "token_counts", "target", "run", "model"),
    }
)


@dataclass(frozen=True)
class BuildConfig:
    """What is built: a model, cut and compiled in one way for one kind of CPU."""

    spec: str
    model_path: str
    """Where config.json, and the weights if they are needed, come from."""
    formats: Variant
    context: int
    layers: int
    granularity: Granularity
    target: Target
    defaults: RunDefaults
    """How it is run; no part of what is compiled, so it may be edited at any time."""
    model: dict[str, Any]
    """The Hugging Face configuration."""

    @property
    def variant(self) -> str:
        """The variant's name."""
        return self.formats.name

    @property
    def family(self) -> str:
        """The model type that transformers knows it by."""
        return str(self.model["model_type"])

    def to_json(self) -> str:
        """JSON text; `shapes` and `token_counts` are for the reader."""
        shapes = {name: self.model[name] for name in _SHAPES if name in self.model}
        return (
            json.dumps(
                {
                    "format": FORMAT_VERSION,
                    "spec": self.spec,
                    "model_path": self.model_path,
                    "formats": asdict(self.formats),
                    "context": self.context,
                    "layers": self.layers,
                    **asdict(self.granularity),
                    "shapes": shapes,
                    "token_counts": {"prefill": f"1 to {self.context}", "decode": "any"},
                    "target": asdict(self.target),
                    "run": asdict(self.defaults),
                    "model": self.model,
                },
                indent=1,
            )
            + "\n"
        )

    def digest(self) -> str:
        """SHA-256 of what decides the generated code and files."""
        decisive = asdict(self)
        del decisive["spec"], decisive["model_path"], decisive["defaults"]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def resolve_config(settings: BuildSettings) -> BuildConfig:
    """The configuration of a spec and options; no weights are read."""
    from buddy_pipeline.compile.custom_target import chosen_target
    from buddy_pipeline.partition.strategies import layer_splitter

    resolved = resolve_model(settings)
    layer_splitter(settings.strategy, str(resolved.config["model_type"]))
    sharing = Sharing.WHOLE_GRAPH if settings.whole_graph else Sharing.TEMPLATES
    target = chosen_target(settings.target_triple, settings.target_cpu, settings.target_features)
    return BuildConfig(
        spec=settings.spec,
        model_path=str(resolved.path),
        formats=resolved.formats,
        context=resolved.context,
        layers=resolved.layers,
        granularity=Granularity(settings.strategy, sharing),
        target=target,
        defaults=resolved.defaults,
        model=resolved.config,
    )


def load_config(path: Path) -> BuildConfig:
    """Reads what `to_json` wrote; UserError for anything else."""
    again = "run 'buddy-pipeline gen-config' again"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is not JSON"
        raise UserError(f"--config {path} cannot be read ({why}): {again}") from None
    return config_of(data, f"--config {path}")


def load_imported_config(directory: BuildDirectory, path: Path | None = None) -> BuildConfig:
    """The configuration at `path`, by default the directory's own; UserError unless the directory
    was imported from just that."""
    path = path or directory.config
    manifest = directory.read_manifest()
    config = load_config(path)
    if manifest.config != config.digest():
        raise UserError(
            f"build directory '{directory.root}' was imported from another configuration than"
            f" {path}: run 'buddy-pipeline import' again"
        )
    return config


def config_of(data: Any, where: str) -> BuildConfig:
    """The configuration of `to_json`'s data; UserError, naming `where`, for anything else."""
    again = "run 'buddy-pipeline gen-config' again"
    if not isinstance(data, dict) or "format" not in data or "model" not in data:
        raise UserError(f"{where} is no build configuration: {again}")
    if data["format"] != FORMAT_VERSION:
        raise UserError(
            f"{where} has format {data['format']}, but this version reads format"
            f" {FORMAT_VERSION}: {again}"
        )
    try:
        config = _read_config(data)
        _check_names(config)
    except UserError as error:
        raise UserError(f"{where}: {error}: correct it, or {again}") from None
    return config


def _read_config(data: dict[str, Any]) -> BuildConfig:
    """The fields, each of its type; UserError naming the one that is not. The configuration may be
    edited."""
    check_keys(data, _KEYS)
    context, layers = read_value(data, "context", int), read_value(data, "layers", int)
    for name, count in (("context", context), ("layers", layers)):
        if count < 1:
            raise UserError(f"{name} is {count}: it must be 1 or more")
    sharing = read_value(data, "sharing", str)
    if sharing not in {kind.value for kind in Sharing}:
        raise UserError(f"sharing {sharing!r} is unknown: {nearest(sharing, Sharing)}")
    return BuildConfig(
        spec=read_value(data, "spec", str),
        model_path=read_value(data, "model_path", str),
        formats=read_fields(Variant, data.get("formats"), "formats"),
        context=context,
        layers=layers,
        granularity=Granularity(str(data.get("strategy")), Sharing(sharing)),
        target=_read_target(data.get("target")),
        defaults=read_defaults(data.get("run"), context),
        model=read_object(data["model"], "model"),
    )


def _read_target(value: Any) -> Target:
    target = read_fields(Target, value, "target")
    for name, allowed in TARGET_VALUES.items():
        chosen = getattr(target, name)
        if chosen not in allowed:
            known = ", ".join(map(repr, allowed))
            raise UserError(f"target: {name} is {chosen!r}: it must be one of {known}")
    return target


def _check_names(config: BuildConfig) -> None:
    """Raises UserError for names that nothing has."""
    from buddy_pipeline.partition.strategies import layer_splitter

    formats = config.formats
    uses = (formats.weights, formats.table_and_head, formats.rest, *formats.tensors.values())
    for name in uses:
        if name not in FORMATS:
            raise UserError(f"weight format {name!r} is unknown: {nearest(name, FORMATS)}")
    known_cache_type(formats.cache)
    if not isinstance(config.model.get("model_type"), str):
        raise UserError("model has no model_type: give the one of its config.json")
    layer_splitter(config.granularity.strategy, config.family)
