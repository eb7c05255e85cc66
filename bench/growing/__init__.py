"""What the growth demo and the growth bench share: hosts with planted bottlenecks, data, artifacts,
trials."""
