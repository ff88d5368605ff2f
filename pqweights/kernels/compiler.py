"""Machine code from numba functions that runs without numba.

cpu.py keeps the code and runs it. It imports this module, and numba with it, only to compile.
"""

from __future__ import annotations

import platform
import re

import llvmlite.binding as llvm
import numba
from numba.core import config

from pqweights.kernels import (
    cpu_compensation,
    cpu_factors,
    cpu_gguf_affine,
    cpu_gguf_symmetric,
    cpu_groups,
    cpu_hadamard_scores,
    cpu_importance,
    cpu_kernels,
    cpu_nearest,
    cpu_polar_scores,
    cpu_products,
    cpu_restoring,
    cpu_sums,
    cpu_weighted_values,
    trellis_decoding,
    trellis_encoding,
)
from pqweights.kernels.product_task import TASK_KERNELS

_MODULES = (
    cpu_kernels,
    cpu_groups,
    cpu_compensation,
    cpu_factors,
    cpu_gguf_affine,
    cpu_gguf_symmetric,
    cpu_hadamard_scores,
    cpu_importance,
    cpu_nearest,
    cpu_polar_scores,
    cpu_products,
    cpu_restoring,
    cpu_sums,
    cpu_weighted_values,
    trellis_encoding,
    trellis_decoding,
)
KERNELS = {name: kernel for module in _MODULES for name, kernel in module.KERNELS.items()}
# What OpenMP calls: a function that takes nothing but the address of a task, around one that takes two pointers more.
_ENTRY = """
define void @run_task(ptr %task) {{
  %result = alloca ptr
  %exception = alloca ptr
  %status = call i32 @"{symbol}"(ptr %result, ptr %exception, ptr %task)
  ret void
}}
"""


def compile_kernel(name: str) -> tuple[str, bytes]:
    """The symbol and the object file of a kernel (a key of KERNELS) for this machine.

    Before its own arguments the function takes two pointers: where numba would put a result (a null pointer) and an
    exception. Those of TASK_KERNELS take only the address of their task.
    """
    kernel, signature = KERNELS[name]
    compiled = numba.cfunc(signature, nopython=True, error_model="numpy")(kernel)
    symbol = compiled.native_name.removeprefix("cfunc.")
    # The function itself, without the wrapper that refers to numba's runtime. Some reference counting is left, for
    # arrays that own nothing; it must not call that runtime either.
    code = re.sub(
        r"declare void @NRT_MemInfo_call_dtor\(([^\s)]+).*",
        r"define void @NRT_MemInfo_call_dtor(\1 %0) { ret void }",
        compiled.inspect_llvm(),
    )
    if name in TASK_KERNELS:
        code, symbol = f"{code}\n{_ENTRY.format(symbol=symbol)}", "run_task"
    module = llvm.parse_assembly(code)
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = llvm.Linkage.internal
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=config.CPU_NAME or llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES,
        opt=3,
        reloc="static" if platform.machine() in ("x86_64", "AMD64") else "default",  # as numba does
        codemodel="jitdefault",
    )
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3)))
    needed = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")}
    assert needed <= {"memset", "memcpy", "memmove", "sqrt", "sqrtf"}, needed
    return symbol, target.emit_object(module)
