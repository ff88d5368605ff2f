"""pqweights: offline quantization of checkpoints into masters of packed codes, and exports to what runtimes load.

After `import pqweights`, transformers loads masters: `AutoModelForCausalLM.from_pretrained("master/")`. The import
itself loads neither transformers nor torch (autoload.py).
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
    """Load a model from a folder or from the Hub, and check that no weight is missing or left over.

    path: the folder, or ORG/NAME on the Hub: a master, or any model that transformers loads
    packed: whether to keep the codes of a master in memory and decode them in the forward pass (for inference only)
    dtype, device_map: as in from_pretrained of transformers
    options: other arguments of from_pretrained, such as `revision` and `token`

    Raises SourceError, HubError, MasterError or MissingDependencyError.
    """
    loading = importlib.import_module("pqweights.integrations.transformers")
    return loading.load_model(path, packed=packed, dtype=dtype, device_map=device_map, **options)


autoload.arrange()
