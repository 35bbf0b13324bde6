"""Opening a Hugging Face model directory: its configuration, weights and tokenizer files."""

from pathlib import Path
from typing import Any

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.checkpoint import Checkpoint, TokenizerSource
from buddy_pipeline.ranks.checkpoint.expert_stack import stack_experts
from buddy_pipeline.ranks.checkpoint.json_file import read_json_object, read_text
from buddy_pipeline.ranks.checkpoint.quantised_directory import (
    QUANTIZATION,
    check_complete,
    is_quantised_here,
    open_quantised,
)
from buddy_pipeline.ranks.checkpoint.safetensors_file import SafetensorsTensor, open_safetensors
from buddy_pipeline.ranks.checkpoint.shown import shown

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def open_hf_directory(path: Path) -> Checkpoint:
    """Open a directory with `config.json` and `model.safetensors`, whole or sharded by an index.

    Raises:
        UserError: a file is missing or malformed, or the weights are quantised in a scheme that
            needs more than reading numbers.
    """
    check_complete(path)
    config = read_hf_config(path)
    files, tokenizer = _stored_tensors(path), _tokenizer_source(path, config)
    if not (path / QUANTIZATION).is_file():
        return Checkpoint(path, config, stack_experts(path, files), tokenizer)
    stored, quantisation = open_quantised(path, files)
    return Checkpoint(path, config, stored, tokenizer, quantisation)


def read_hf_config(path: Path) -> dict[str, Any]:
    """Read a directory's `config.json`; UserError as in `open_hf_directory`."""
    if not (path / _CONFIG).is_file():
        raise UserError(f"{path} has no {_CONFIG}; give a Hugging Face model directory")
    config: dict[str, Any] = _with_special_floats(read_json_object(path / _CONFIG))
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{path / _CONFIG}: model_type must be a string naming the model class")
    if is_quantised_here(config):
        del config["quantization_config"]  # the rest is the model's own
        if not (path / QUANTIZATION).is_file():
            raise UserError(
                f"{path} has no {QUANTIZATION}, which its {_CONFIG} promises;"
                " copy the whole directory"
            )
    if config.get("quantization_config"):
        raise UserError(
            f"{path / _CONFIG} has a quantization_config, which is not supported; "
            "use the unquantised checkpoint or a GGUF file"
        )
    return config


def _with_special_floats(value: Any) -> Any:
    """What transformers writes as `{"__float__": "Infinity"}`, which JSON has no number for, as the
    number."""
    if isinstance(value, list):
        return [_with_special_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _with_special_floats(item) for key, item in value.items()}


def _stored_tensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Return the tensors of the single file, or of all shards that the index names."""
    if (path / _WEIGHTS).is_file():
        return open_safetensors(path / _WEIGHTS)
    if not (path / _INDEX).is_file():
        raise UserError(
            f"{path} has neither {_WEIGHTS} nor {_INDEX}; convert the weights to safetensors"
        )
    weight_map = read_json_object(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path / _INDEX} has no object weight_map; download it again")
    shards: dict[str, dict[str, SafetensorsTensor]] = {}
    tensors = {}
    for name, file_name in weight_map.items():
        if not _is_plain_name(file_name):
            raise UserError(
                f"{path / _INDEX}: tensor {shown(name)} is in {shown(file_name)}, "
                "which is not the name of a file beside the index"
            )
        if file_name not in shards:
            shards[file_name] = open_safetensors(path / file_name)
        if name not in shards[file_name]:
            raise UserError(
                f"{path / file_name} has no tensor {shown(name)}, which {_INDEX} places there"
            )
        tensors[name] = shards[file_name][name]
    return tensors


def _is_plain_name(value: Any) -> bool:
    """Whether `value` names a file beside the index: an index must not lead elsewhere."""
    return isinstance(value, str) and value.isprintable() and Path(value).name == value != ""


def _tokenizer_source(path: Path, config: dict[str, Any]) -> TokenizerSource:
    json_path = path / "tokenizer.json"
    tokenizer_config = _optional_object(path / "tokenizer_config.json")
    generation_config = _optional_object(path / "generation_config.json")
    add_bos = tokenizer_config.get("add_bos_token")
    return TokenizerSource(
        json_path=json_path if json_path.is_file() else None,
        config=tokenizer_config,
        chat_template=_chat_template(path, tokenizer_config),
        eos_ids=_token_ids(path, "eos_token_id", generation_config, config),
        bos_id=next(iter(_token_ids(path, "bos_token_id", generation_config, config)), None),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Return `chat_template.jinja`, else the tokenizer's template, of several the default one."""
    if (path / "chat_template.jinja").is_file():
        return read_text(path / "chat_template.jinja")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        defaults = [t for t in template if isinstance(t, dict) and t.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path / 'tokenizer_config.json'}: chat_template must be a string")
    return template


def _token_ids(path: Path, key: str, *configs: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids under `key` in the first of `configs` that has any."""
    for config in configs:
        value = config.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and i >= 0 for i in ids):
            raise UserError(
                f"{path}: {key} is {shown(value)}; it must be a token id or a list of them"
            )
        return tuple(ids)
    return ()
