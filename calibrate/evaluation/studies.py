"""Parts of studies beside the evaluation's units: kept in the same folder, so that an interrupted report goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from calibrate.evaluation.units import Row, Store


@dataclass(frozen=True)
class Part:
    """One row's worth of work of a study.

    Attributes:
        study: its name.
        label: the part's name.
        settings: everything else that the row depends on, beside the subject; what JSON can hold.
    """

    study: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A file name that tells parts, and units, apart."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def remember(part: Part, make: Callable[[], Row], store: Store | None) -> Row:
    """The part's row: from the store, or made and kept there."""
    row = None if store is None else store.find(part)
    if row is None:
        row = make()
        if store is not None:
            store.keep(part, row)
    return row
