"""A quantizer configuration that meets a target: searched on the simulator, converted, and measured."""
