"""Triton launches recorded instead of run, and compiled for GPUs that need not be there."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime import JITFunction

OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its arguments by name, and the options of its compilation."""

    kernel: JITFunction
    arguments: dict[str, Any]
    options: dict[str, int]

    def source(self) -> ASTSource:
        """The kernel specialised to these arguments as a launch would specialise it."""
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], list[list[Any]]] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            specialised = not parameter.do_not_specialize
            if parameter.is_constexpr or (specialised and isinstance(value, int) and value == 1):
                signature[parameter.name] = "constexpr"
                constants[parameter.name] = value
                continue
            signature[parameter.name] = _type_name(value)
            if specialised and _is_multiple_of_16(value):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    def compile(self, capability: int) -> CompiledKernel:
        """For the compute capability, 80 for 8.0; no GPU takes part."""
        return triton.compile(self.source(), target=GPUTarget("cuda", capability, 32), options=self.options)


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {
            torch.float32: "fp32",
            torch.float16: "fp16",
            torch.bfloat16: "bf16",
            torch.float8_e4m3fn: "fp8e4nv",
        }
        return "*" + (names.get(value.dtype) or f"i{8 * value.element_size()}")
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _is_multiple_of_16(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


class LaunchRecorder:
    """Stands in for a kernel: `recorder[grid](...)` adds to `launches`."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> "LaunchRecorder":
        assert all(size > 0 for size in grid)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
        assert set(arguments) == set(self.kernel.arg_names)
        self.launches.append(Launch(self.kernel, arguments, options))
