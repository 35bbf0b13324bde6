"""A directory that `quantize` wrote must be what it says, and what the spec wants."""

import json
import shutil
from pathlib import Path

import pytest

from buddy_pipeline.compile.manifest import Parameter, WeightPart
from buddy_pipeline.compile.variant import VARIANTS
from buddy_pipeline.launcher.element_counts import model_counts
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import ModelSettings
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import open_checkpoint
from buddy_pipeline.ranks.quantising import convert, plan_conversion
from tests.checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Query, key and value have a bias, the other linears none."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", tie_word_embeddings=False)


def quantised(original: Path, folder: Path, biased: bool) -> Path:
    """The model in w8a8, without the program that finds out its parameters."""
    checkpoint = open_checkpoint(original)
    parameters = []
    for name, info in checkpoint.tensors.items():
        has_bias = name.replace("weight", "bias") in checkpoint.tensors
        is_linear = len(info.shape) == 2 and "embed" not in name and (biased or not has_bias)
        part = WeightPart((name,), (), info.shape, False)
        form = ("panels", (part,), 32, "w8a8") if is_linear else ("plain", (part,), 0, "f32")
        parameters.append(Parameter(*form))

    def copy(folder: Path) -> None:
        for source in original.glob("*.json"):
            shutil.copyfile(source, folder / source.name)

    conversion = plan_conversion(checkpoint, parameters, "w8a8", biased)
    convert(conversion, folder, lambda count: None, [copy])
    return folder


def opened(folder: Path, spec: dict[str, object]) -> Model:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return open_model(ModelSettings(spec=str(path), local_model=folder))


@pytest.mark.parametrize("biased", [True, False])
def test_a_spec_that_wants_other_linears_quantised_is_refused(
    biased: bool, original: Path, tmp_path: Path
) -> None:
    folder = quantised(original, tmp_path / "q", biased)

    def spec(biased: bool) -> dict[str, object]:
        counts = model_counts(open_checkpoint(original), VARIANTS["w8a8"], biased)
        override = {"total": counts.total, "linear_elements": counts.linear}
        return {"variant": "w8a8", "weights_override": override}

    assert opened(folder, spec(biased)).formats.biased is biased
    with pytest.raises(UserError, match=r"weights_override stands for .* quantize the original"):
        opened(folder, spec(not biased))


@pytest.mark.parametrize("variant", ["f32", "w4a16"])
def test_a_directory_of_another_variant_than_it_says_is_refused(
    variant: str, original: Path, tmp_path: Path
) -> None:
    folder = quantised(original, tmp_path / "q", biased=True)
    path = folder / "quantization.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "variant": variant}))
    with pytest.raises(UserError, match=rf"quantised as {variant}, but its tensor .* is in w8"):
        opened(folder, {})
