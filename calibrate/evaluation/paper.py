"""The figures that the BASE paper (arXiv 2609.36222v1) prints, for tables that stand beside our own."""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "arXiv 2609.36222v1"
TASKS = ("cmmlu", "boolq", "bbh", "math", "gsm8k", "math401", "heval", "mbpp")


@dataclass(frozen=True)
class PaperRow:
    """A line of the paper's table 1.

    Attributes:
        policy: by our name.
        setting: its hyperparameters as the paper states them.
        average: over eight benchmarks, percent.
        tokens_per_s: end to end, batch 16, one H100.
    """

    policy: str
    setting: str
    average: float
    tokens_per_s: float


@dataclass(frozen=True)
class PaperModel:
    """One architecture in the paper's table 1: the dense line, and the lines of both regimes."""

    name: str
    dense: PaperRow
    regimes: dict[str, tuple[PaperRow, ...]]


TABLE_1 = {
    "qwen3_moe": PaperModel(
        "Qwen3-30B-A3B-Instruct-2507",
        PaperRow("dense", "", 82.50, 845.3),
        {
            "restricted": (
                PaperRow("sere", "S=1", 37.54, 1452.9),
                PaperRow("oea", "k0=1", 43.01, 1372.5),
                PaperRow("lynx", "alpha=.47 beta=1", 46.87, 1304.9),
                PaperRow("exfold", "D=8", 44.40, 1395.4),
                PaperRow("base", "M=10", 76.38, 1463.5),
            ),
            "relaxed": (
                PaperRow("sere", "S=2", 70.23, 1223.5),
                PaperRow("oea", "k0=2", 70.15, 1190.7),
                PaperRow("lynx", "alpha=3 beta=2", 81.72, 1047.9),
                PaperRow("exfold", "D=18", 79.82, 1225.8),
                PaperRow("base", "M=16", 82.47, 1350.2),
            ),
        },
    ),
    "qwen2_moe": PaperModel(
        "Qwen1.5-MoE-A2.7B-Chat",
        PaperRow("dense", "", 49.85, 1315.6),
        {
            "restricted": (
                PaperRow("sere", "S=1", 31.81, 1720.1),
                PaperRow("oea", "k0=1", 44.46, 1711.8),
                PaperRow("lynx", "alpha=.7 beta=1", 38.88, 1677.6),
                PaperRow("exfold", "D=11", 42.16, 1744.8),
                PaperRow("base", "M=11", 47.42, 1799.6),
            ),
            "relaxed": (
                PaperRow("sere", "S=2", 45.77, 1476.7),
                PaperRow("oea", "k0=2", 48.98, 1460.9),
                PaperRow("lynx", "alpha=3 beta=2", 47.59, 1479.6),
                PaperRow("exfold", "D=21", 48.94, 1468.6),
                PaperRow("base", "M=18", 49.76, 1609.8),
            ),
        },
    ),
    "deepseek_v2": PaperModel(
        "DeepSeek-V2-Lite-Chat",
        PaperRow("dense", "", 53.59, 1056.4),
        {
            "restricted": (
                PaperRow("sere", "S=1", 26.31, 1633.2),
                PaperRow("oea", "k0=1", 44.30, 1589.2),
                PaperRow("lynx", "alpha=.5 beta=1", 29.72, 1514.8),
                PaperRow("exfold", "D=9", 43.25, 1621.7),
                PaperRow("base", "M=10", 50.91, 1679.4),
            ),
            "relaxed": (
                PaperRow("sere", "S=2", 48.17, 1365.2),
                PaperRow("oea", "k0=2", 52.06, 1362.1),
                PaperRow("lynx", "alpha=.7 beta=1", 49.68, 1302.3),
                PaperRow("exfold", "D=19", 53.44, 1381.3),
                PaperRow("base", "M=19", 54.02, 1435.7),
            ),
        },
    ),
}
"""By `model_type` of the architecture."""

TABLE_2 = {
    "top1_union": (85.91, 58.68),
    "weight_sum": (82.61, 42.87),
    "squared_weight": (90.98, 55.50),
    "static_energy": (92.65, 64.46),
    "base": (96.47, 73.50),
    "oracle": (100.0, 73.58),
}
"""Ranking rules on Qwen3-30B at the size of the top-1 union: retained energy %, accuracy % (seven benchmarks)."""

TABLE_3 = {"drop": 74.20, "backfill": 76.45, "substitute": 27.49}
"""Fill rules on Qwen3-30B at M=10: accuracy %, mean of four benchmarks."""

BATCH_BUDGETS = {
    "qwen3_moe": {8: 10, 16: 10, 32: 24, 64: 32, 128: 48},
    "deepseek_v2": {8: 10, 16: 12, 32: 19, 64: 24, 128: 32},
    "qwen2_moe": {8: 6, 16: 14, 32: 21, 64: 34, 128: 34},
}
"""Budgets of the paper's sweep over batch sizes, matched to the faster of SERE S=1 and OEA k0=1."""
