"""A transformers model without weights: parameters on the meta device, buffers in memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from buddy_pipeline.compile.attention_op import attention_of
from buddy_pipeline.compile.experts_op import register_experts
from buddy_pipeline.partition.errors import UserError

#: Characters of a reason that transformers or torch gives; some list every model there is.
_LONGEST_REASON = 300


def build_on_meta(config: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """The model that a config.json describes, on the meta device, and the values of its buffers.

    Raises UserError for one that transformers does not know or cannot build.
    """
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.initialization import no_init_weights

    fields = {k: v for k, v in config.items() if k not in ("torch_dtype", "dtype")}
    model_type = fields.pop("model_type", None)
    if not model_type:
        raise UserError(
            "the model's config.json has no 'model_type'; add the one it was saved with"
        )
    fields.pop("quantization_config", None)
    if model_type not in CONFIG_MAPPING:
        raise UserError(
            f"model type '{model_type}' is not known to the installed transformers "
            f"{transformers.__version__}; correct it in config.json, or install a version that "
            "knows it"
        )
    try:
        settings = AutoConfig.for_model(model_type, **fields)
    except Exception as error:
        # Each class checks its entries in its own way, or trips over them.
        raise UserError(_unusable(model_type, error)) from error
    kind, settings = _model_class(settings, config.get("architectures"))
    attention = attention_of(kind)
    with no_init_weights(), _parameters_on_meta():
        try:
            model = kind._from_config(
                settings,
                attn_implementation=attention,
                experts_implementation=register_experts(),
                dtype=torch.float32,
            ).eval()
        except Exception as error:
            raise UserError(_unusable(model_type, error)) from error
    buffers = {name: b.detach().cpu() for name, b in model.named_buffers() if not b.is_meta}
    for name, buffer in buffers.items():
        if buffer.dtype is torch.bfloat16:
            raise UserError(f"buffer '{name}' of the model is of bfloat16, which has no kernel yet")
    model.to("meta")
    model.tie_weights()  # moving the parameters has untied them
    return model, {name: buffer.numpy() for name, buffer in buffers.items()}


def _model_class(settings: Any, architectures: Any) -> tuple[Any, Any]:
    """transformers' causal language model for a configuration, and the configuration that it takes:
    where a model has several parts, that of the text.

    The class is that of the model type, or the one that config.json names.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(architectures, list | None):
        raise UserError(
            f"the model's config.json has architectures {architectures!r}; it must be a list of"
            " class names"
        )
    named = architectures[0] if architectures else ""
    if type(settings) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    elif named in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        found = getattr(transformers, named)
    else:
        raise UserError(
            f"model type '{settings.model_type}' has no causal language model in transformers; "
            "only such models run here"
        )
    kind: Any = found[0] if isinstance(found, tuple) else found
    if isinstance(settings, kind.config_class):
        return kind, settings
    return kind, settings.get_text_config()


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters are moved to the meta device as they are made; buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def register_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None
    ) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def _unusable(model_type: str, error: Exception) -> str:
    return (
        f"the model's config.json does not describe a model of type '{model_type}' that "
        f"transformers can build: {one_line(error)}"
    )


def one_line(error: Exception) -> str:
    """An error's type and message, cut where it would fill the screen."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_LONGEST_REASON]}"
