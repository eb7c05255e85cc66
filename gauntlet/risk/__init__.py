"""How likely an artifact is to fail in use, learned from outcomes: features, simulated deployments,
models."""
