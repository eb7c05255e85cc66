"""How operators of torch (ATen) are written in the graph language: a tuple RULES per family."""
