"""The whole graph as a compiler user would compile it without this project.

transformers' class exported with its own attention for a fixed number of tokens, decomposed,
imported by torch-mlir as one linalg module, lowered by upstream passes to loops, LLVM at -O3.
Weights are arguments, so none are made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchkit.child import run_in_child
from buddy_pipeline.compile.target import Target

_PASSES = (
    "builtin.module(canonicalize,"
    "func.func(linalg-generalize-named-ops,linalg-fuse-elementwise-ops,canonicalize,cse),"
    "eliminate-empty-tensors,empty-tensor-to-alloc-tensor,"
    "one-shot-bufferize{bufferize-function-boundaries=1"
    " function-boundary-type-conversion=identity-layout-map},"
    "buffer-results-to-out-params{modify-public-functions=1},canonicalize,cse,"
    "func.func(convert-linalg-to-loops,math-expand-ops{ops=fpowi}),canonicalize,cse,"
    "expand-strided-metadata,lower-affine,convert-scf-to-cf,convert-math-to-libm,"
    "convert-math-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,finalize-memref-to-llvm,"
    "convert-cf-to-llvm,convert-func-to-llvm{use-bare-ptr-memref-call-conv=1},"
    "reconcile-unrealized-casts)"
)


@dataclass(frozen=True)
class NaiveTimes:
    """Seconds of each stage, and the object's size."""

    export: float
    imports: float
    compile: float
    bytes: int


def compile_naively(config: dict[str, Any], tokens: int, target: Target) -> NaiveTimes:
    """Compiles the prefill of `tokens` tokens of the model in a process of its own."""
    return run_in_child("the naive compiler", _compile, config, tokens, target)


def _compile(config: dict[str, Any], tokens: int, target: Target) -> NaiveTimes:
    import torch
    from torch_mlir import fx
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    settings = AutoConfig.for_model(config["model_type"], **fields)
    started = time.perf_counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    model.to("meta")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names, values = list(state), [value.detach() for value in state.values()]

    class Whole(torch.nn.Module):
        def forward(
            self,
            ids: torch.Tensor,
            positions: torch.Tensor,
            mask: torch.Tensor,
            *values: torch.Tensor,
        ) -> torch.Tensor:
            arguments = {
                "input_ids": ids,
                "position_ids": positions,
                "attention_mask": mask,  # torch-mlir cannot lower what transformers makes one with
                "use_cache": False,
            }
            here = dict(zip(names, values, strict=True))
            logits: torch.Tensor = torch.func.functional_call(model, here, kwargs=arguments).logits
            return logits

    ids, positions = (torch.zeros(1, tokens, dtype=torch.long, device="meta") for _ in range(2))
    mask = torch.zeros(1, 1, tokens, tokens, device="meta")
    with torch.no_grad():
        program = torch.export.export(Whole(), (ids, positions, mask, *values), strict=False)
    exported = time.perf_counter()
    module = fx.export_and_import(program, output_type="linalg-on-tensors", func_name="forward")
    text = str(module)
    imported = time.perf_counter()

    from buddy_pipeline.compile.lowering import load_mlir

    load_mlir()
    import llvmlite.binding as llvm
    from mlir import ir
    from mlir.dialects.llvm import translate_module_to_llvmir
    from mlir.passmanager import PassManager

    from buddy_pipeline.compile.codegen import target_machine

    with ir.Context():
        lowered = ir.Module.parse(text)
        PassManager.parse(_PASSES).run(lowered.operation)
        code = translate_module_to_llvmir(lowered.operation)
    machine = target_machine(target)
    linked = llvm.parse_assembly(code)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(linked, builder)
    size = len(machine.emit_object(linked))
    return NaiveTimes(exported - started, imported - exported, time.perf_counter() - imported, size)
