"""Random models, quantized at random, through every analysis; what is found is reduced to a script: ``make fuzz``."""
