"""Ways in from other descriptions of a network; not part of `import esper_ir`: they need their framework."""
