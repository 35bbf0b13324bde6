"""Rotary position embedding parameters from a GGUF file, as transformers' `rope_parameters`."""

import math
from typing import Any

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint.gguf_fields import Fields, shortest_decimal

# llama.cpp's and transformers' base where the file does not say.
DEFAULT_BASE = 10000.0

# Llama 3.1's published values of low_freq_factor, high_freq_factor and
# original_max_position_embeddings, which llama.cpp's converter assumes as well.
_LLAMA3 = (1.0, 4.0, 8192)

# Far above any model's context; a fit beyond it is no Llama 3 scaling.
_MAX_CONTEXT = 1 << 31

# Factors are stored in float32 and were computed in it.
_TOLERANCE = 1e-4


def rope_parameters(fields: Fields, llama3_factors: np.ndarray | None, dim: int) -> dict[str, Any]:
    """Return `rope_parameters` for rotary embeddings of `dim` dimensions a head.

    Args:
        llama3_factors: the tensor `rope_freqs.weight`, float32 [dim / 2], if the file has it.

    Raises:
        UserError: the scaling is of a kind that transformers cannot express.
    """
    base = fields.number("rope.freq_base", DEFAULT_BASE)
    kind = fields.text("rope.scaling.type", "none")
    if llama3_factors is not None:
        if kind != "none":
            raise fields.error("rope.scaling.type", "absent or none beside rope_freqs.weight")
        return {"rope_theta": base, **_llama3(fields, llama3_factors, base, dim)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        factor = fields.number("rope.scaling.factor")
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn":
        yarn: dict[str, Any] = {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": fields.number("rope.scaling.factor"),
            "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
        }
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in fields:
                yarn[name] = fields.number(f"rope.scaling.yarn_{name}")
        return yarn
    raise fields.error("rope.scaling.type", "none, linear or yarn for this architecture")


def longrope_parameters(
    fields: Fields, long_factors: np.ndarray, short_factors: np.ndarray
) -> dict[str, Any]:
    """Return `rope_parameters` of Phi-3's long-context models, whose factors are tensors."""
    return {
        "rope_type": "longrope",
        "rope_theta": fields.number("rope.freq_base", DEFAULT_BASE),
        "long_factor": long_factors.tolist(),
        "short_factor": short_factors.tolist(),
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
    }


def _llama3(fields: Fields, factors: np.ndarray, base: float, dim: int) -> dict[str, Any]:
    """Find the Llama 3 scaling parameters that give `factors`.

    GGUF stores the resulting factor for each frequency, transformers the parameters of the
    formula. Only ratios of the three wavelength parameters matter, so low_freq_factor can be 1.
    """
    frequencies = base ** -(np.arange(0, dim, 2) / dim)
    factor = shortest_decimal(float(factors.max()))
    for low, high, context in (_LLAMA3, *_fitted(factors, frequencies, factor)):
        expected = _llama3_factors(frequencies, factor, low, high, context)
        if np.allclose(factors, expected, rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise UserError(
        f"{fields.path}: tensor rope_freqs.weight is not a Llama 3 scaling of the rotary "
        "frequencies, the only kind supported; use the original checkpoint"
    )


def _fitted(
    factors: np.ndarray, frequencies: np.ndarray, factor: float
) -> list[tuple[float, float, int]]:
    """Solve for (low, high, context) from the frequencies that are scaled in part.

    Between the bounds 1/factors is linear in the frequency: with s the smooth weight,
    1/factors = (1 - s) / factor + s and s = (context · frequency / 2π - low) / (high - low).
    """
    partial = (factors > 1 + _TOLERANCE) & (factors < factor * (1 - _TOLERANCE))
    if partial.sum() < 2:
        return []
    smooth = (1 / factors[partial].astype(float) - 1 / factor) / (1 - 1 / factor)
    slope, offset = map(float, np.polyfit(frequencies[partial] / (2 * math.pi), smooth, 1))
    if offset >= 0 or not 1 <= -slope / offset <= _MAX_CONTEXT:
        return []
    return [(1.0, float(f"{1 - 1 / offset:.5g}"), round(-slope / offset))]


def _llama3_factors(
    frequencies: np.ndarray, factor: float, low: float, high: float, context: int
) -> np.ndarray:
    """The formula of transformers' `_compute_llama3_parameters`, as factors on the wavelengths."""
    smooth = np.clip((context * frequencies / (2 * math.pi) - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
