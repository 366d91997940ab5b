"""The predictor artifact: one safetensors file that every backend loads.

Tensors `layers.{i}.weight [E, d]`, `layers.{i}.bias [E]`, `layers.{i}.mean_energy [E]` in float32 or bfloat16; the
metadata holds one JSON document: the card, and a SHA-256 over it and the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Literal

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from base_core.files import write_atomically
from base_core.predictor import Card, LayerPredictor, Predictor, PredictorError

FILE_NAME = "predictor.safetensors"
CARD_KEY, CHECKSUM = "base_moe", "sha256"
TENSORS = ("weight", "bias", "mean_energy")


def to_bfloat16(array: NDArray) -> NDArray[np.uint16]:
    """Rounds finite float32 to the nearest bfloat16, ties to even, as its 16 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def checksum(document: dict, tensors: dict[str, bytes]) -> str:
    """SHA-256 over a JSON document and tensors."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name])
    return digest.hexdigest()


def save_predictor(
    path: str | os.PathLike, predictor: Predictor, dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    """Writes the artifact, whole or not at all.

    Args:
        dtype: of `weight` on disk; the small tensors stay float32.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtype!r} cannot be stored: choose float32 or bfloat16")
    card = predictor.card.to_document()
    arrays: dict[str, NDArray] = {}
    for i, layer in predictor.layers.items():
        for name in TENSORS:
            array = np.ascontiguousarray(getattr(layer, name), np.float32)
            arrays[f"layers.{i}.{name}"] = to_bfloat16(array) if name == "weight" and dtype == "bfloat16" else array
    card[CHECKSUM] = checksum(card, {name: array.tobytes() for name, array in arrays.items()})
    specs = {name: _spec(array) for name, array in arrays.items()}
    # One key only: safetensors writes several in no fixed order, and one predictor must always give the same bytes.
    write_atomically(path, bytes(serialize(specs, metadata={CARD_KEY: json.dumps(card, sort_keys=True)})))


def _spec(array: NDArray) -> TensorSpec:
    """Borrows `array`, whose uint16 bits are bfloat16; keep it alive while the spec is in use."""
    stored = "bfloat16" if array.dtype == np.uint16 else "float32"
    return TensorSpec(dtype=stored, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)


def read_metadata(content: bytes) -> dict[str, str]:
    """The metadata of a safetensors file in memory; ValueError when it has no whole header."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})


def read_predictor(content: bytes, name: str) -> Predictor:
    """Reads an artifact from memory; `name` is for the messages.

    Raises:
        PredictorError: truncated, altered, foreign, or inconsistent content.
    """
    try:
        stored = dict(deserialize(content))
        metadata = read_metadata(content)
    except (SafetensorError, ValueError) as error:
        raise PredictorError(f"{name} is no whole safetensors file ({error}): copy or calibrate it again") from error
    if CARD_KEY not in metadata:
        raise PredictorError(f"{name} is a safetensors file but no predictor: its metadata lacks {CARD_KEY!r}")
    data = {key: bytes(tensor["data"]) for key, tensor in stored.items()}
    try:
        document = json.loads(metadata[CARD_KEY])
        found = document.pop(CHECKSUM, None)
    except (ValueError, AttributeError) as error:
        raise PredictorError(f"{name} is damaged: its card is no JSON object; copy or calibrate it again") from error
    if found != checksum(document, data):
        raise PredictorError(f"{name} is damaged: its {CHECKSUM} does not match; copy or calibrate it again")
    try:
        card = Card.from_document(document)
    except PredictorError as error:
        raise PredictorError(f"{name}: {error}") from error
    layers = {}
    for i in card.layers:
        arrays = {}
        for tensor in TENSORS:
            key = f"layers.{i}.{tensor}"
            if key not in stored:
                raise PredictorError(f"{name} lacks the tensor {key!r}: calibrate again")
            dtype, shape = stored[key]["dtype"], stored[key]["shape"]
            if dtype == "F32":
                array = np.frombuffer(data[key], np.float32)
            elif dtype == "BF16":
                array = from_bfloat16(np.frombuffer(data[key], np.uint16))
            else:
                raise PredictorError(f"{name}: tensor {key!r} has dtype {dtype}, expected F32 or BF16")
            arrays[tensor] = array.reshape(shape)
        layers[i] = LayerPredictor(**arrays)
    try:
        return Predictor(card, layers)
    except PredictorError as error:
        raise PredictorError(f"{name}: {error}") from error


def load_predictor(source: str | os.PathLike, revision: str | None = None) -> Predictor:
    """Loads a predictor from a file, a folder that holds `predictor.safetensors`, or a hub repository.

    Args:
        source: a path, or a hub id `owner/name`.
        revision: branch, tag or commit for a hub id. `HF_HUB_OFFLINE=1` uses the local cache only.

    Raises:
        PredictorError: nothing there, or a file that `read_predictor` refuses.
    """
    path = Path(source)
    if path.is_dir():
        path = path / FILE_NAME
    if not path.is_file():
        path = _download(str(source), revision)
    return read_predictor(path.read_bytes(), str(source))


def _download(source: str, revision: str | None) -> Path:
    try:
        return Path(hf_hub_download(source, FILE_NAME, revision=revision))
    except HFValidationError as error:
        raise PredictorError(
            f"predictor {source!r} is neither a file, a folder with {FILE_NAME}, nor a hub id owner/name"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        at = f" at revision {revision!r}" if revision else ""
        reason = str(error).splitlines()[0]
        raise PredictorError(
            f"predictor {source!r} is no local file and cannot be had from the hub{at}: {reason}"
        ) from error
