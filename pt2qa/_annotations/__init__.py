"""What a quantizer annotates and what the converted model does, place by place; and how two such lists differ."""
