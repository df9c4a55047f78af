"""``metrics.jsonl``: one JSON object per line, written as the run goes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from poseidon.tracking.folder import finite


class MetricsWriter:
    """Appends records to a file, at most once per ``interval`` seconds and on :meth:`close`.

    Call it between steps only: it may write to the disk.
    """

    def __init__(self, path: Path, interval: float = 1.0) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1 << 16)
        self._interval = interval
        self._flushed = time.monotonic()

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        if time.monotonic() - self._flushed >= self._interval:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
