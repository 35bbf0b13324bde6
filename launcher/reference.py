"""What transformers computes with the same weights, in a process of its own.

    python -m buddy_pipeline.launcher.reference CHECKPOINT SEQUENCES.npz OUT.npz

SEQUENCES holds token ids, int64 [n], by name; OUT gets the logits after each of them under the same
names, float32 [n, vocab].
"""

import sys
from pathlib import Path

import numpy as np

from buddy_pipeline.partition.errors import UserError
from buddy_pipeline.ranks.checkpoint import Checkpoint, open_checkpoint


def main(checkpoint: str, sequences: str, out: str) -> int:
    """Writes the reference; exit code 2, with the reason on standard error, for a user's error."""
    try:
        results = _compute(open_checkpoint(Path(checkpoint)), dict(np.load(sequences)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    np.savez(out, **results)  # type: ignore[arg-type]
    return 0


def _compute(checkpoint: Checkpoint, sequences: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    import torch

    model = _load(checkpoint)
    # Without a cache: its numbers would be another implementation's, not the model's.
    with torch.no_grad():
        return {
            name: model(torch.as_tensor(ids)[None], use_cache=False).logits[0].float().numpy()
            for name, ids in sequences.items()
        }


def _load(checkpoint: Checkpoint):  # type: ignore[no-untyped-def]  # torch is not imported above
    """transformers' class in f32 with the checkpoint's weights, whatever file they are in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(checkpoint.config)
    fields.pop("dtype", None)
    fields.pop("torch_dtype", None)
    settings = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(
        settings,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            found = checkpoint.expect(name, *_tied_names(model, name), shape=tuple(parameter.shape))
            parameter.copy_(torch.from_numpy(checkpoint.read(found.name)))
    return model


def _tied_names(model, name: str) -> list[str]:  # type: ignore[no-untyped-def]
    """Other names of a parameter."""
    parameter = dict(model.named_parameters(remove_duplicate=False))
    return [other for other, value in parameter.items() if value is parameter[name]]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
