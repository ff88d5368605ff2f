"""pqweights: offline weight quantization of checkpoints into packed codes, and exports to what runtimes load.

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
    """Load the model in a folder, or that of an id on the Hub, and check that no weight is missing or left over.

    path: a master of ours, or any model that transformers loads
    packed: keep the codes of a master in memory, and decode in the forward pass (inference only)
    dtype, device_map: as in from_pretrained of transformers
    options: more arguments of from_pretrained, `revision` and `token` included

    Raises SourceError, HubError, MasterError or MissingDependencyError.
    """
    loading = importlib.import_module("pqweights.integrations.transformers")
    return loading.load_model(path, packed=packed, dtype=dtype, device_map=device_map, **options)


autoload.arrange()
