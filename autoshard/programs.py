"""Saves programs of `torch.export` without traces of the machine, and calls saved ones fast.

An exported program's `module()` checks its inputs against the recorded constraints on every
call, which takes longer than a small network. Here the recorded graph is called itself; who
calls it makes sure of shapes and types.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def save_program(program: torch.export.ExportedProgram, path: str | Path) -> None:
    """Save a program for `load_program`, the same bytes wherever it was exported.

    torch records with each operation the lines of source that led to it, by absolute path;
    they are left out, and with them the only thing that differs between two checkouts.

    Args:
        program: as exported; its traces are removed in place.
        path: the file, with the suffix .pt2.
    """
    import torch

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    with warnings.catch_warnings():
        # torch warns of weights that share storage with a larger tensor; ours are whole.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        torch.export.save(program, path)


def load_program(path: str | Path) -> Callable[..., Any]:
    """Load an exported program with a single result.

    Args:
        path: as written by `torch.export.save`.

    Returns:
        A function of the program's tensors, given in order.

    Raises:
        Exception: whatever torch raises for a file that it cannot read.
    """
    import torch
    from torch.export.graph_signature import InputKind

    program = torch.export.load(path)
    signature = program.graph_signature
    specs = signature.input_specs
    lifted = [spec for spec in specs if spec.kind is not InputKind.USER_INPUT]
    plain = {InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
    is_simple = (
        all(spec.kind in plain for spec in lifted)
        # Inputs come after what was lifted out of the module: parameters and buffers.
        and specs[: len(lifted)] == lifted
        and len(signature.output_specs) == 1
        and not signature.buffers_to_mutate
    )
    if not is_simple:
        return program.module()
    values = []
    for spec in lifted:
        value = program.state_dict.get(spec.target)  # type: ignore[arg-type]
        values.append(program.constants[spec.target] if value is None else value)  # type: ignore[index]
    graph = program.graph_module.forward

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        return graph(*values, *inputs)[0]

    return call
