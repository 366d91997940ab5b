"""One torch thread: the models here are tiny, and two threads that wait for each other on a busy machine take minutes."""

import torch

torch.set_num_threads(1)
