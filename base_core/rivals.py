"""What SERE and ExFold calibrate for one model, in one safetensors file (`base-moe calibrate --rivals`).

Tensors of every MoE layer: `layers.{i}.similarity_{kind} [E, E]`, `.norm [E]`, `.fold_scalar [E, E]`,
`.fold_loss [E, E]`, float32; the metadata holds one JSON document with the model's card and the calibration's settings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from base_core.artifact import checksum, read_metadata
from base_core.files import write_atomically
from base_core.policies import RivalCalibration
from base_core.predictor import Card, PredictorError

FORMAT, VERSION = "base-moe-rivals", 1
DOCUMENT_KEY, CHECKSUM = "base_moe_rivals", "sha256"
SIMILARITIES = ("frobenius", "cosine", "cka")
TENSORS = (*(f"similarity_{kind}" for kind in SIMILARITIES), "norm", "fold_scalar", "fold_loss")
DEFAULT_RIVAL_TOKENS = 51_200
"""Tokens of a calibration: 400 sequences of 128, as in SERE's paper."""
UNSEEN_LOSS = np.float32(1e30)
"""Folding loss of a pair that was never routed together, and of an expert onto itself: above any other."""


@dataclass(frozen=True)
class Rivals:
    """The rivals' calibration of every MoE layer.

    Attributes:
        card: of the model and the text, as a predictor's; its fields on fits stay empty.
        settings: how it was calibrated.
        layers: by layer index, each tensor of `TENSORS` by name, float32.

    Raises:
        ValueError: shapes that contradict the card, or values that are not finite.
    """

    card: Card
    settings: Mapping[str, Any]
    layers: Mapping[int, Mapping[str, NDArray[np.float32]]]

    def __post_init__(self) -> None:
        E = self.card.num_experts
        if set(self.layers) != set(self.card.layers):
            raise ValueError(f"rivals hold layers {sorted(self.layers)}, their card says {list(self.card.layers)}")
        for i, tensors in self.layers.items():
            for name in TENSORS:
                shape = (E,) if name == "norm" else (E, E)
                array = tensors.get(name)
                if array is None or array.shape != shape or not np.isfinite(array).all():
                    raise ValueError(f"rivals layers.{i}.{name} is no finite tensor {list(shape)}: calibrate again")

    def calibration(self, layer: int, similarity: str = "frobenius") -> RivalCalibration:
        """What the policies read of one layer.

        Raises:
            ValueError: an unknown kind of similarity.
        """
        if similarity not in SIMILARITIES:
            raise ValueError(f"unknown similarity {similarity!r}: choose one of {', '.join(SIMILARITIES)}")
        tensors = self.layers[layer]
        return RivalCalibration(
            tensors[f"similarity_{similarity}"], tensors["norm"], tensors["fold_scalar"], tensors["fold_loss"]
        )


def save_rivals(path: str | os.PathLike, rivals: Rivals) -> None:
    """Writes the file, whole or not at all."""
    arrays = {
        f"layers.{i}.{name}": np.ascontiguousarray(rivals.layers[i][name], np.float32)
        for i in rivals.card.layers
        for name in TENSORS
    }
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "card": rivals.card.to_document(),
        "settings": dict(rivals.settings),
    }
    document[CHECKSUM] = checksum(document, {name: array.tobytes() for name, array in arrays.items()})
    # One key only: safetensors writes several in no fixed order, and one calibration must always give the same bytes.
    write_atomically(path, save(arrays, metadata={DOCUMENT_KEY: json.dumps(document, sort_keys=True)}))


def load_rivals(path: str | os.PathLike) -> Rivals:
    """Reads and checks the file.

    Raises:
        ValueError: no such file, or truncated, altered, foreign or inconsistent content.
    """
    name = f"rivals file {str(path)!r}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error
    try:
        stored, metadata = dict(deserialize(content)), read_metadata(content)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{name} is no whole safetensors file ({error}): calibrate again") from error
    if DOCUMENT_KEY not in metadata:
        raise ValueError(f"{name} holds no rivals: its metadata lacks {DOCUMENT_KEY!r}; base-moe calibrate --rivals")
    data = {key: bytes(tensor["data"]) for key, tensor in stored.items()}
    try:
        document = json.loads(metadata[DOCUMENT_KEY])
        found = document.pop(CHECKSUM, None)
        if document.get("format") != FORMAT or document.get("version") != VERSION:
            raise ValueError(f"format {document.get('format')!r}, version {document.get('version')!r}")
        if found != checksum(document, data):
            raise ValueError("its sha256 does not match")
        card = Card.from_document(document["card"])
        layers = {
            i: {
                tensor: np.frombuffer(data[f"layers.{i}.{tensor}"], np.float32).reshape(
                    stored[f"layers.{i}.{tensor}"]["shape"]
                )
                for tensor in TENSORS
            }
            for i in card.layers
        }
        return Rivals(card, document["settings"], layers)
    except (ValueError, KeyError, AttributeError, TypeError, PredictorError) as error:
        raise ValueError(f"{name} is damaged or of another version ({error}): calibrate again") from error
