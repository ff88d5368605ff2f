"""pqweights: offline quantization of checkpoints into masters of packed codes, and exports to what runtimes load.

    import pqweights

    pqweights.quantize("model/", "master/", bits=5)
    pqweights.export("master/", "exported/", "bf16")
    model = pqweights.load_model("master/")

After `import pqweights`, transformers loads masters: `AutoModelForCausalLM.from_pretrained("master/")`. The import
itself loads neither transformers nor torch (runtime/loading/autoload.py), and the functions of the API (api.py) on
first use.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from pqweights.errors import PqweightsError
from pqweights.runtime.loading import autoload

if TYPE_CHECKING:
    from pqweights.api import export, generate, inspect, plan, quantize, rebuild, verify
    from pqweights.runtime.kv.cache import kv_cache

__all__ = [
    "PqweightsError",
    "__version__",
    "export",
    "generate",
    "inspect",
    "kv_cache",
    "load_model",
    "plan",
    "quantize",
    "rebuild",
    "verify",
]
__version__ = "0.2.0"

# The functions of the API, by the module that has them.
_FUNCTIONS = {
    **dict.fromkeys(("export", "generate", "inspect", "plan", "quantize", "rebuild", "verify"), "pqweights.api"),
    "kv_cache": "pqweights.runtime.kv.cache",
}


def load_model(
    path: str | os.PathLike[str], *, packed: bool = False, dtype: Any = "auto", device_map: Any = None, **options: Any
) -> Any:
    """Load a model from a folder or from the Hub, and check that no weight is missing or left over.

    path: the folder, or ORG/NAME on the Hub: a master, or any model that transformers loads
    packed: whether to keep the codes of a master in memory and decode them in the forward pass (for inference only)
    dtype, device_map: as in from_pretrained of transformers
    options: other arguments of from_pretrained, such as `revision` and `token`

    Raises SourceError, HubError, MasterError or MissingDependencyError.
    """
    loading = importlib.import_module("pqweights.runtime.loading.transformers")
    return loading.load_model(path, packed=packed, dtype=dtype, device_map=device_map, **options)


def __getattr__(name: str) -> Any:
    """Import the functions of the API on first use."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_FUNCTIONS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})


autoload.arrange()
