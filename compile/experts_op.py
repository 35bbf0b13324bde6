"""The experts op: what transformers' classes call while they are exported, in place of a loop over
experts.

A function registered with transformers hands the rows of a mixture of experts to a custom op that
multiplies each with the matrices of its chosen experts only. The gate between the two matrices, the
router's weights and the sum stay what the model's class says: ordinary arithmetic.
"""

from typing import Any

import torch

from buddy_pipeline.partition.errors import UserError

_NAME = "buddy_pipeline"


@torch.library.custom_op("bp::expert_linear", mutates_args=())
def expert_linear(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    """One token's row times the matrix of each expert that it chose: x [1, inputs] or one row a
    choice [choices, inputs], choice int64 [1, choices], weight [experts, outputs, inputs] (or
    [experts, inputs, outputs] if `transposed`), bias [experts, outputs] to [choices, outputs].
    Only traced, never run."""
    raise RuntimeError("bp::expert_linear is compiled to a kernel and has no eager implementation")


@expert_linear.register_fake
def _shape_only(
    x: torch.Tensor,
    choice: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
) -> torch.Tensor:
    return x.new_empty(choice.numel(), weight.shape[2 if transposed else 1])


def register_experts() -> str:
    """Makes transformers know the op as an experts implementation; returns its name."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(_NAME, _experts_function)
    return _NAME


def _experts_function(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' experts signature for one token, hidden_states [1, hidden]."""
    if args or kwargs:
        names = ", ".join(kwargs) or "more arguments than three"
        raise UserError(f"experts of {type(module).__name__} use {names}, which has no kernel yet")

    def multiply(rows: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        weight = getattr(module, name)
        return torch.ops.bp.expert_linear(rows, top_k_index, weight, bias, module.is_transposed)

    rows = multiply(hidden_states, "gate_up_proj" if module.has_gate else "up_proj")
    rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
    rows = multiply(rows, "down_proj")
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    return (rows * top_k_weights.reshape(-1, 1)).sum(dim=0, keepdim=True).to(hidden_states.dtype)
