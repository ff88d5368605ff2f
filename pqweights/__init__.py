"""pqweights: offline weight quantization. Streams a checkpoint into packed codes and block norms, and out again.

After `import pqweights`, transformers loads masters: `AutoModelForCausalLM.from_pretrained("master/")`. This imports neither
transformers nor torch (autoload.py).
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from pqweights import autoload

__all__ = ["__version__", "load_model"]
__version__ = "0.2.0"


def load_model(
    path: str | os.PathLike[str], *, packed: bool = False, dtype: Any = "auto", device_map: Any = None, **options: Any
) -> Any:
    """The model in a folder, or of that id on the Hub: a master of ours, or any that transformers loads; nothing missing,
    nothing left over.

    packed: keep the codes of a master in memory and decode in the forward pass (inference only). dtype, device_map and options
    are those of transformers' from_pretrained (`revision` and `token`, too). Raises SourceError, HubError, MasterError, MissingDependencyError.
    """
    loading = importlib.import_module("pqweights.integrations.transformers")
    return loading.load_model(path, packed=packed, dtype=dtype, device_map=device_map, **options)


autoload.arrange()
