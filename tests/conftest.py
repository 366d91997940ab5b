"""One torch thread: the models are tiny, and two threads waiting for each other on a busy machine take minutes."""

import torch

torch.set_num_threads(1)
