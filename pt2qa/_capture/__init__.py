"""Capture: from an ``nn.Module`` to an exported program whose ops can be followed and quantized."""
