"""Triton kernels run under its interpreter where there is no GPU; it reads this when it is imported."""

import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run: a red test is red again. `pytest --hypothesis-profile=search` looks for new ones.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.register_profile("search", max_examples=1000)
hypothesis.settings.load_profile("repeatable")
