"""One engine that judges what changes a quantized model: for diagnosis, reconfiguration and repair."""
