"""How each kind of model is converted, by where it keeps its positions."""
