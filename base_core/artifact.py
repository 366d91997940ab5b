"""The predictor artifact: one safetensors file that every backend loads.

Tensors `layers.{i}.weight [E, d]`, `layers.{i}.bias [E]`, `layers.{i}.mean_energy [E]` in float32 or bfloat16, the
weight also in int8 with a float32 factor for each row, `layers.{i}.weight_scale [E]`. The metadata holds one JSON
document: the card, and a SHA-256 over it and the tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from numpy.typing import NDArray
from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from base_core.files import write_atomically
from base_core.predictor import Card, LayerPredictor, Predictor, PredictorError

FILE_NAME = "predictor.safetensors"
CARD_KEY, CHECKSUM = "base_moe", "sha256"
SCALE = "weight_scale"
TENSORS = ("weight", "bias", "mean_energy")
Dtype = Literal["float32", "bfloat16", "int8"]
DTYPES = get_args(Dtype)
STORED = {np.dtype(np.float32): "float32", np.dtype(np.uint16): "bfloat16", np.dtype(np.int8): "int8"}
"""Names in safetensors; bfloat16 is handled as its 16 bits."""


def to_bfloat16(array: NDArray) -> NDArray[np.uint16]:
    """Rounds finite float32 to the nearest bfloat16, ties to even, as its 16 bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_int8(weight: NDArray) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Rows of [E, d] in 255 steps between minus and plus their largest magnitude: the steps, and factors [E]."""
    scale = np.maximum(np.abs(weight).max(1), np.finfo(np.float32).tiny).astype(np.float32) / np.float32(127)
    return np.rint(weight / scale[:, None]).clip(-127, 127).astype(np.int8), scale


def from_int8(steps: NDArray[np.int8], scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 values [E, d] of what `to_int8` gave."""
    return steps * scale[:, None]


def checksum(document: dict, tensors: dict[str, bytes]) -> str:
    """SHA-256 over a JSON document and tensors."""
    digest = hashlib.sha256(json.dumps(document, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + b"\0" + tensors[name])
    return digest.hexdigest()


def save_predictor(path: str | os.PathLike, predictor: Predictor, dtype: Dtype = "float32") -> None:
    """Writes the artifact, whole or not at all.

    Args:
        dtype: of `weight` on disk; the small tensors stay float32.

    Raises:
        ValueError: an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be stored: choose one of {', '.join(DTYPES)}")
    card = predictor.card.to_document()
    arrays: dict[str, NDArray] = {}
    for i, layer in predictor.layers.items():
        own: dict[str, NDArray] = {name: np.ascontiguousarray(getattr(layer, name), np.float32) for name in TENSORS}
        if dtype == "bfloat16":
            own["weight"] = to_bfloat16(own["weight"])
        elif dtype == "int8":
            own["weight"], own[SCALE] = to_int8(own["weight"])
        arrays.update({f"layers.{i}.{name}": array for name, array in own.items()})
    card[CHECKSUM] = checksum(card, {name: array.tobytes() for name, array in arrays.items()})
    specs = {name: _spec(array) for name, array in arrays.items()}
    # One key only: safetensors writes several in no fixed order, and one predictor must always give the same bytes.
    write_atomically(path, bytes(serialize(specs, metadata={CARD_KEY: json.dumps(card, sort_keys=True)})))


def _spec(array: NDArray) -> TensorSpec:
    """Borrows `array`; keep it alive while the spec is in use."""
    return TensorSpec(dtype=STORED[array.dtype], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)


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

    def tensor(key: str, scale: str | None = None) -> NDArray[np.float32]:
        if key not in stored:
            raise PredictorError(f"{name} lacks the tensor {key!r}: calibrate again")
        dtype, shape = stored[key]["dtype"], stored[key]["shape"]
        if dtype == "F32":
            return np.frombuffer(data[key], np.float32).reshape(shape)
        if dtype == "BF16":
            return from_bfloat16(np.frombuffer(data[key], np.uint16)).reshape(shape)
        if dtype != "I8" or scale is None:
            allowed = "F32 or BF16" if scale is None else "F32, BF16 or I8"
            raise PredictorError(f"{name}: tensor {key!r} has dtype {dtype}, expected {allowed}")
        factors = tensor(scale)
        if len(shape) != 2 or factors.shape != (shape[0],):
            raise PredictorError(f"{name}: tensor {key!r} has shape {shape}, its factors {scale!r} {factors.shape}")
        return from_int8(np.frombuffer(data[key], np.int8).reshape(shape), factors)

    layers = {
        i: LayerPredictor(
            tensor(f"layers.{i}.weight", f"layers.{i}.{SCALE}"),
            *(tensor(f"layers.{i}.{small}") for small in TENSORS[1:]),
        )
        for i in card.layers
    }
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
