"""A recorder for `watch` that keeps every row of the inputs of every matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MatrixId = tuple[str, int | None]


class RecordedRows:
    """along_rows: by matrix, whether the model stores the matrix as [N, K]."""

    def __init__(self) -> None:
        self.along_rows: dict[MatrixId, bool] = {}
        self._rows: dict[tuple[MatrixId, bool], list[npt.NDArray[np.float32]]] = {}

    def add(self, matrix_id: MatrixId, values: Any, *, along_rows: bool, window: int, held_back: bool) -> None:
        self.along_rows[matrix_id] = along_rows
        rows = values.detach().reshape(-1, values.shape[-1]).float().numpy().copy()
        self._rows.setdefault((matrix_id, held_back), []).append(rows)

    def rows(self, matrix_id: MatrixId, *, held_back: bool) -> npt.NDArray[np.float32]:
        """All rows of a matrix, [rows, K]."""
        return np.concatenate(self._rows[matrix_id, held_back])
