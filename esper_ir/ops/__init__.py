"""Operator families: one file each, with a tuple OPS of records. `esper_ir.registry` collects them."""
