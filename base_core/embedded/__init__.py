"""The embedded model: a small trained mixture of experts and its predictor, shipped so that everything runs offline."""

from pathlib import Path

MODELS = ("qwen3_moe",)


def model_path(name: str = "qwen3_moe") -> Path:
    """Folder of an embedded checkpoint, which transformers and mlx-lm both load.

    Raises:
        ValueError: no such embedded model.
    """
    if name not in MODELS:
        raise ValueError(f"no embedded model {name!r}: choose one of {', '.join(MODELS)}")
    return Path(__file__).parent / name


def predictor_path(name: str = "qwen3_moe") -> Path:
    """File of the predictor calibrated on an embedded checkpoint."""
    return model_path(name) / "predictor.safetensors"
