"""Compiled physical batches: forward pass, losses, backward pass, norms and weighted sum as one program.

The engine `ghost` is recorded once, on a physical batch of fixed size, together with its proof: the recorded operators
are the ones that were proved, and nothing else runs on later batches (torch.fx records, TorchInductor compiles).

    programs     which batch runs which program, and when its sum is compared with the engine's
    recording    what may not be recorded
    traceable    per-record gradients in a form without shapes or branches that depend on data

This uses internal interfaces of torch 2.13. A version from public interfaces alone, torch.compile of torch.func.vmap,
reached the same speed, but needs 370 lines and covers fewer models (docs/engine.md#compiling).
"""

from .programs import BatchLoss, Compiled, check_compiler

__all__ = ["BatchLoss", "Compiled", "check_compiler"]
