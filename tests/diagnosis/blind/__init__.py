"""The blind half of the bench: what people get wrong, written from what they report, not from how it is diagnosed."""
