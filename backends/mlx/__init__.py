"""BASE for mlx-lm models on Apple silicon; on Linux the same code runs on MLX's CPU backend, for correctness only."""

from backends.mlx.integration import Policy, Session, apply, base_budget, restore, session_of

__all__ = ["Policy", "Session", "apply", "base_budget", "restore", "session_of"]
