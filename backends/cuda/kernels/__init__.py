"""Triton kernels whose cost follows the active experts: `front` decides, `experts` runs what it decided.

Three launches a layer up to 32 rows: `front`, and `gate_up` and `down` of `experts`. Each file holds one stage: its
kernels, their wrapper, and a naive twin in plain torch that the tests compare it with. `module` is what transformers'
routers and experts call; `resources` compiles everything for GPUs that are not there.
"""
