"""The `quantize` command: a model in few bits on disk, so that no start quantises it again."""

import json
import shutil
import sys
import time
from pathlib import Path

import tokenizers
import typer

from buddy_pipeline.compile.cache import Cache, write_atomically
from buddy_pipeline.compile.target import host_target
from buddy_pipeline.launcher.building import plan_model
from buddy_pipeline.launcher.gguf_tokenizer import build_gguf_tokenizer, pre_tokenizer
from buddy_pipeline.launcher.model import Model, open_model
from buddy_pipeline.launcher.settings import QuantizeSettings
from buddy_pipeline.launcher.variants import quantised_variants
from buddy_pipeline.partition.counted import counted
from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.quantised_directory import METHOD
from buddy_pipeline.ranks.quantising import convert, plan_conversion

#: What a tokenizer, its chat template and the end of an answer are read from.
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)


def quantize_command(settings: QuantizeSettings) -> int:
    """Writes the model's quantised matrices and whatever else a run needs; prints what that took.

    Goes on where an earlier run of the same command was interrupted.
    """
    started = time.perf_counter()
    model = open_model(settings)
    checkpoint, formats = model.checkpoint, model.formats
    if not formats.quantised:
        raise UserError(
            f"variant {formats.name} quantises nothing: use --variant {quantised_variants()}"
        )
    if checkpoint.quantisation is not None:
        raise UserError(
            f"{checkpoint.path} is quantised already, as {checkpoint.quantisation.variant}: give"
            " the original model"
        )
    plan, _ = plan_model(model, host_target(), Cache.open(settings.cache_dir), show=True)
    parameters = [p for partition in plan.partitions for p in partition.parameters]
    conversion = plan_conversion(checkpoint, parameters, formats.name, formats.biased)
    with typer.progressbar(length=conversion.bytes, label="quantizing", file=sys.stderr) as bar:
        convert(conversion, settings.output, bar.update, [lambda folder: _copy(model, folder)])
    seconds = time.perf_counter() - started
    matrices = counted(len(conversion.matrices), "matrix", "matrices")
    print(
        f"{settings.output}: {formats.name}, {matrices} quantised,"
        f" {conversion.bytes / 1e6:,.1f} MB, {seconds:.1f} s"
    )
    return 0


def _copy(model: Model, folder: Path) -> None:
    """Writes the files beside the weights; the configuration says that these are quantised."""
    checkpoint = model.checkpoint
    how = {"quant_method": METHOD, "variant": model.variant}
    _write(folder / "config.json", {**checkpoint.config, "quantization_config": how})
    if checkpoint.path.is_dir():
        for name in _COPIED:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    else:
        _write_gguf_tokenizer(model, folder)


def _write_gguf_tokenizer(model: Model, folder: Path) -> None:
    """The tokenizer of a GGUF file in Hugging Face's files."""
    source = model.checkpoint.tokenizer
    assert source.gguf is not None
    tokenizer = build_gguf_tokenizer(source.gguf)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    default = pre_tokenizer(source.gguf).add_bos
    settings = {"add_bos_token": default if source.add_bos is None else source.add_bos}
    _write(folder / "tokenizer_config.json", {**source.config, **settings})
    generation = {"eos_token_id": list(source.eos_ids), "bos_token_id": source.bos_id}
    _write(folder / "generation_config.json", {k: v for k, v in generation.items() if v or v == 0})
    if source.chat_template is not None:
        write_atomically(folder / "chat_template.jinja", source.chat_template.encode())


def _write(path: Path, content: dict[str, object]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
