"""Every place of a model with what its quantizer asks for there, and how two quantizers differ."""
