"""buddy-mlir's spec files for DeepSeek R1: keys and values as they are there.

From `models/deepseek_r1/specs/` of https://github.com/buddy-compiler/buddy-mlir. The content of
`f32_packed_decode` is what its documentation on packed decoding says: that of `f32` with the width
of a panel, as `f16_packed_decode` has it.
"""

from typing import Any

_COMMON: dict[str, Any] = {
    "hf_model_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
    "model_family": "deepseek_r1",
    "max_token_len": 1024,
    "num_threads": 48,
}
_FLOATS = {
    "total": 1777088064,
    "linear_elements": 0,
    "linear_output_channels": 0,
    "other_elements": 0,
}

BUDDY_SPECS: dict[str, dict[str, Any]] = {
    "f32": {**_COMMON, "variant": "f32", "weights_override": _FLOATS},
    "f16": {**_COMMON, "variant": "f16", "weights_override": _FLOATS},
    "f32_tiered_kv_cache": {
        **_COMMON,
        "variant": "f32",
        "tiered_kv_cache": {"enabled": True, "cache_sizes": [32, 64, 128, 256, 512, 1024]},
        "weights_override": _FLOATS,
    },
    "f32_packed_decode": {
        **_COMMON,
        "variant": "f32",
        "decode_pack_vector_size": 32,
        "weights_override": _FLOATS,
    },
    "f32_chunked": {
        **_COMMON,
        "variant": "f32",
        "weights_override": _FLOATS,
        "prefill_chunk": 64,
    },
    "f32_packed_decode_tiered_kv_cache": {
        **_COMMON,
        "variant": "f32",
        "decode_pack_vector_size": 32,
        "tiered_kv_cache": {"enabled": True, "cache_sizes": [64, 128, 256, 512, 1024]},
        "weights_override": {"total": 1777088064},
    },
    "f16_k3": {
        **_COMMON,
        "variant": "f16",
        "num_threads": 8,
        "decode_pack_vector_size": 32,
        "decode_pack_panels_per_iteration": 1,
        "weights_override": _FLOATS,
    },
}

READ_BESIDES: dict[str, Any] = {
    "cache_sizes": "32,64",
    "weights_file": "arg0_mc.data",
    "vocab_file": "vocab.txt",
    "hf_config_path": "config.json",
    "prefill_chunk": True,
    "arena": True,
    "hugepages": True,
}
"""Keys that no file above has, but `tools/buddy-codegen/gen_config.py` or another spec there."""
