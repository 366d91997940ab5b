"""The embedded models: small trained mixtures of experts with predictors, shipped so that everything runs offline."""

from pathlib import Path

MODELS = ("qwen3_moe", "qwen2_moe", "deepseek_v2")
PREFIX = "embedded/"


def model_path(name: str = MODELS[0]) -> Path:
    """Folder of an embedded checkpoint, which transformers and mlx-lm both load.

    Raises:
        ValueError: no such embedded model.
    """
    if name not in MODELS:
        raise ValueError(f"no embedded model {name!r}: choose one of {', '.join(MODELS)}")
    return Path(__file__).parent / name


def predictor_path(name: str = MODELS[0]) -> Path:
    """File of the predictor calibrated on an embedded checkpoint."""
    return model_path(name) / "predictor.safetensors"


def resolve_model(reference: str | None, predictor: str | None = None) -> tuple[str, str | None]:
    """What `--model` and `--predictor` stand for: None is the first embedded model, `embedded/NAME` any of them.

    Returns:
        A folder or hub id; and the predictor's, the embedded one where the model is embedded and none was given.

    Raises:
        ValueError: no embedded model of that name.
    """
    if reference is None:
        reference = PREFIX + MODELS[0]
    if not reference.startswith(PREFIX):
        return reference, predictor
    name = reference.removeprefix(PREFIX)
    return str(model_path(name)), predictor or str(predictor_path(name))
