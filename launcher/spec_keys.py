"""Which keys a spec may have and which values they take, as one table."""

from collections.abc import Mapping
from typing import Any

from buddy_pipeline.compile.variant import CACHE_TYPES
from buddy_pipeline.launcher.json_keys import Kind, is_count

_TEXT = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
_POSITIVE = Kind("a whole number of 1 or more", lambda value: is_count(value, 1))
_COUNT = Kind("a whole number of 0 or more", lambda value: is_count(value, 0))
_FLAG = Kind("true or false", lambda value: isinstance(value, bool))


def _is_sizes(value: Any) -> bool:
    if isinstance(value, str):
        return all(part.strip().isdecimal() and int(part) >= 1 for part in value.split(","))
    return isinstance(value, list) and all(is_count(size, 1) for size in value)


_SIZES = Kind('a list of whole numbers of 1 or more, such as [64, 128] or "64,128"', _is_sizes)
_CHUNK = Kind(
    "true, false or a whole number of 0 or more",
    lambda value: isinstance(value, bool) or is_count(value, 0),
)

_DISTRIBUTION = Kind(
    "the name of a package: letters, digits, - and _",
    lambda value: isinstance(value, str) and value.replace("-", "_").isidentifier(),
)

_CACHE_TYPE = Kind(f"one of {', '.join(CACHE_TYPES)}", lambda value: value in CACHE_TYPES)

SPEC: Mapping[str, Kind] = {
    "hf_model_path": _TEXT,
    "model_family": _TEXT,
    "variant": _TEXT,
    "quantization": _TEXT,
    "max_token_len": _POSITIVE,
    "kv_cache_dtype": _CACHE_TYPE,
    "num_threads": _POSITIVE,
    "weights_override": Kind(
        "an object with the key total",
        lambda value: isinstance(value, dict),
        {
            "total": _POSITIVE,
            "linear_elements": _COUNT,
            "linear_output_channels": _COUNT,
            "other_elements": _COUNT,
            "f16_elements": _COUNT,
            "i8_elements": _COUNT,
        },
        ("total",),
    ),
    "weights_package": Kind(
        "an object with the keys distribution and file",
        lambda value: isinstance(value, dict),
        {"distribution": _DISTRIBUTION, "file": _TEXT},
        ("distribution", "file"),
    ),
    "tiered_kv_cache": Kind(
        "true, false or an object with the keys enabled and cache_sizes",
        lambda value: isinstance(value, bool | dict),
        {"enabled": _FLAG, "cache_sizes": _SIZES},
    ),
    "cache_sizes": _SIZES,
    "prefill_chunk": _CHUNK,
    # Weights are packed once, in one layout for both phases, for the CPU's own vectors.
    "decode_pack_vector_size": _COUNT,
    "decode_pack_panels_per_iteration": _COUNT,
    # Weights always lie in one arena on huge pages.
    "arena": _FLAG,
    "hugepages": _FLAG,
    # Files that buddy-mlir makes from a model. Tensors, tokenizer and configuration are read from
    # the model itself, so that they belong together.
    "weights_file": _TEXT,
    "vocab_file": _TEXT,
    "hf_config_path": _TEXT,
}

WITHOUT_EFFECT = frozenset(
    {
        "decode_pack_vector_size",
        "decode_pack_panels_per_iteration",
        "arena",
        "hugepages",
        "weights_file",
        "vocab_file",
        "hf_config_path",
    }
)
"""Keys of buddy-mlir that are accepted and change nothing here, for the reasons above."""
