"""Inductor's code generation for the simulated device: that for the CPU, on the device's own tensors.

Only imported by `device`: it takes Inductor along.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch._inductor import ir, scheduler
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.virtualized import V

CPU = torch.device("cpu")
LIKE_CPU = ("cpu", "spyre")


def schedule_like_the_cpu() -> None:
    """Loops are fused and reordered in ways that the C++ generator does not know, unless they are for the CPU."""

    def is_cpu_node(self: scheduler.BaseSchedulerNode) -> bool:
        device = self.get_device()
        return device is not None and device.type in LIKE_CPU

    scheduler.BaseSchedulerNode.is_cpu = is_cpu_node
    ir.is_cpu = lambda x: ir.get_device_type(x) in LIKE_CPU


class SpyreScheduling(CppScheduling):
    """C++ loops. Here and there their generator asks whether it works for the CPU: it is told so."""

    def codegen_node(self, node: Any) -> None:
        with V.graph.set_current_device(CPU):
            super().codegen_node(node)

    def flush(self) -> None:
        with V.graph.set_current_device(CPU):
            super().flush()


class SpyreWrapper(PythonWrapperCodegen):
    """The Python around the loops: allocates on the device, calls the rest by its name, and says when it runs."""

    @staticmethod
    def create(
        is_subgraph: bool, subgraph_name: str | None, parent_wrapper: Any, partition_signatures: Any = None
    ) -> PythonWrapperCodegen:
        if is_subgraph:
            return PythonWrapperCodegen.create(is_subgraph, subgraph_name, parent_wrapper, partition_signatures)
        return SpyreWrapper()

    def _generate_kernel_call_helper(
        self, kernel_name: str, call_args: Any, *, device: Any = None, **rest: Any
    ) -> None:
        super()._generate_kernel_call_helper(kernel_name, call_args, device=CPU, **rest)

    def generate_after_suffix(self, result: Any) -> None:
        super().generate_after_suffix(result)
        result.writeline("call = torch.spyre.compiled_region(call)")


class SourceInKey(CustomGraphModulePass):
    """Does nothing but put this package into the key of Inductor's cache, whose entries hold what it led to."""

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        pass

    def uuid(self) -> str:
        sources = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".py", ".cpp"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
