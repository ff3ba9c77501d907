"""What the examples in docstrings need before them."""

import torch

import pt2qa

x = torch.linspace(-1, 1, 32).reshape(8, 4)
capture = pt2qa.capture(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), x)
pair = pt2qa.quantize(capture, "xnnpack", [x], progress=False)
