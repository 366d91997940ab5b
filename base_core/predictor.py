"""The predictor: how energetic an expert's output would be for this token, before the expert runs (paper section 6.1).

For expert e of a layer, s_e(z) = a_e . z / ||z|| + b_e estimates log(||E_e(z)||^2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from base_core.fingerprint import FINGERPRINT_TOLERANCE, fingerprint_distance

FORMAT = "base-moe-predictor"
VERSION = 1


class PredictorError(ValueError):
    """A predictor that is broken, foreign, or made for another model."""


@dataclass(frozen=True)
class LayerPredictor:
    """One MoE layer's predictor.

    Attributes:
        weight: float32 [E, d], the rows a_e.
        bias: float32 [E], b_e with the correction for exponentiating folded in.
        mean_energy: float32 [E], calibration mean of ||E_e(z)||^2, for the static ranking.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]
    mean_energy: NDArray[np.float32]

    def log_energy(self, z: NDArray) -> NDArray[np.float32]:
        """Predicted log ||E_e(z_t)||^2 for router inputs z [T, d]: float32 [T, E]."""
        z = np.asarray(z, np.float32)
        norm = np.linalg.norm(z, axis=-1, keepdims=True)
        return z / np.maximum(norm, np.finfo(np.float32).tiny) @ self.weight.T + self.bias

    def static_log_energy(self) -> NDArray[np.float32]:
        """Log of the calibration mean, float32 [E]: what the static ranking knows."""
        return np.log(np.maximum(self.mean_energy, np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class Card:
    """Where a predictor comes from and what it fits; the JSON document in the artifact's metadata.

    Attributes:
        model_id, model_revision, model_type: of the calibrated model.
        layers: indices of its MoE layers, ascending, as the model numbers its decoder layers.
        num_experts, experts_per_token, hidden_size: E, k, d.
        fingerprint: 16 numbers per layer, see `base_core.fingerprint`.
        source: what text it was calibrated on.
        tokens: calibration tokens.
        eps: added to the squared norm before the logarithm.
        pairs: token-expert pairs seen, per layer and expert.
        ridge: the regularisation chosen, per layer and expert.
        fit: per layer, named quality figures (`r2`, `residual_std`, ...).
        fallback: per layer, the experts that had too few pairs and use the layer's mean predictor.
        versions: library versions of the calibration.
    """

    model_id: str
    model_type: str
    layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    hidden_size: int
    fingerprint: Mapping[int, tuple[float, ...]]
    model_revision: str | None = None
    source: str = ""
    tokens: int = 0
    eps: float = 0.0
    pairs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ridge: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    fit: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    fallback: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_document(self) -> dict[str, Any]:
        """JSON-ready form; layer indices become string keys."""
        return json.loads(json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}))

    @classmethod
    def from_document(cls, document: Any) -> Card:
        """Reads and checks the JSON form.

        Raises:
            PredictorError: naming the field at fault.
        """
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise PredictorError(f"not a predictor: the card's format field must be {FORMAT!r}")
        if document.get("version") != VERSION:
            raise PredictorError(
                f"predictor version {document.get('version')!r} is not supported: this release reads {VERSION}"
            )
        values = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        for name in (
            "model_id",
            "model_type",
            "layers",
            "num_experts",
            "experts_per_token",
            "hidden_size",
            "fingerprint",
        ):
            if name not in values:
                raise PredictorError(f"predictor card lacks the field {name!r}: calibrate again")
        for name in ("num_experts", "experts_per_token", "hidden_size"):
            if type(values[name]) is not int or values[name] < 1:
                raise PredictorError(f"predictor card field {name!r} is {values[name]!r}: expected a positive integer")
        try:
            values["layers"] = tuple(int(i) for i in values["layers"])
            for name in ("fingerprint", "pairs", "ridge", "fallback"):
                values[name] = {int(i): tuple(v) for i, v in values.get(name, {}).items()}
            values["fit"] = {int(i): dict(v) for i, v in values.get("fit", {}).items()}
        except (TypeError, ValueError, AttributeError) as error:
            raise PredictorError(f"predictor card is malformed: {error}") from error
        card = cls(**values)
        if not card.layers or list(card.layers) != sorted(set(card.layers)):
            raise PredictorError(f"predictor card field 'layers' is {card.layers}: expected ascending layer indices")
        if card.experts_per_token > card.num_experts:
            raise PredictorError(
                f"predictor card has experts_per_token {card.experts_per_token} above num_experts {card.num_experts}"
            )
        if set(card.fingerprint) != set(card.layers):
            raise PredictorError("predictor card field 'fingerprint' does not cover the layers: calibrate again")
        return card


@dataclass(frozen=True)
class Predictor:
    """A calibrated predictor for every MoE layer of one model.

    Raises:
        PredictorError: shapes that contradict the card, or values that are not finite.
    """

    card: Card
    layers: Mapping[int, LayerPredictor]

    def __post_init__(self) -> None:
        if set(self.layers) != set(self.card.layers):
            raise PredictorError(
                f"predictor holds layers {sorted(self.layers)}, its card says {list(self.card.layers)}"
            )
        E, d = self.card.num_experts, self.card.hidden_size
        for i, layer in self.layers.items():
            for name, shape in (("weight", (E, d)), ("bias", (E,)), ("mean_energy", (E,))):
                array = getattr(layer, name)
                if array.shape != shape:
                    raise PredictorError(f"predictor layers.{i}.{name} has shape {array.shape}, its card says {shape}")
                if not np.isfinite(array).all():
                    raise PredictorError(
                        f"predictor layers.{i}.{name} holds values that are not finite: calibrate again"
                    )
            if (layer.mean_energy < 0).any():
                raise PredictorError(f"predictor layers.{i}.mean_energy holds negative values: calibrate again")

    def log_energy(self, layer: int, z: NDArray) -> NDArray[np.float32]:
        """Predicted log-energies of all experts of `layer` for router inputs z [T, d]: float32 [T, E]."""
        return self.layers[layer].log_energy(z)

    def check_model(
        self,
        *,
        model_type: str,
        layers: tuple[int, ...],
        num_experts: int,
        experts_per_token: int,
        hidden_size: int,
        fingerprint: Mapping[int, tuple[float, ...]],
        tolerance: float = FINGERPRINT_TOLERANCE,
    ) -> None:
        """Refuses a model that this predictor was not made for.

        Args:
            fingerprint: of the model's routers, per layer.
            tolerance: largest relative router distance accepted; raise it for a heavily quantised copy.

        Raises:
            PredictorError: naming the first field that differs, both values, and what to do.
        """
        for name, value in (
            ("model_type", model_type),
            ("layers", tuple(layers)),
            ("num_experts", num_experts),
            ("experts_per_token", experts_per_token),
            ("hidden_size", hidden_size),
        ):
            if getattr(self.card, name) != value:
                raise PredictorError(
                    f"predictor is for another model: its {name} is {getattr(self.card, name)!r}, the model's is "
                    f"{value!r}; calibrate one for this model (base-moe calibrate)"
                )
        distance = fingerprint_distance(self.card.fingerprint, fingerprint)
        if not distance <= tolerance:
            raise PredictorError(
                f"predictor fingerprint differs from the model's routers by {distance:.3f} (tolerance {tolerance:g}): "
                f"it was calibrated on {self.card.model_id!r}; calibrate one for this model, or raise the tolerance "
                f"for a quantised copy"
            )


def random_predictor(seed: int = 0, **facts: Any) -> Predictor:
    """A predictor that knows nothing, its log-energies spread by about 1: for measurements of speed.

    Args:
        facts: what `Predictor.check_model` compares, of the model it is for.
    """
    card = Card(model_id="random", **facts)
    generator = np.random.default_rng(seed)
    E, d = card.num_experts, card.hidden_size
    layers = {
        i: LayerPredictor(
            generator.standard_normal((E, d), np.float32),
            generator.standard_normal(E, np.float32),
            np.ones(E, np.float32),
        )
        for i in card.layers
    }
    return Predictor(card, layers)
