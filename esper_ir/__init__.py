"""BlueprintIR: the graph language. Knows nothing of Triton, disks or GPUs."""
