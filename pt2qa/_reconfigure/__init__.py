"""A quantizer configuration that meets a target: found on the simulator, converted and measured."""
