"""The library: blueprints, artifacts, verdicts and outcomes,
stored so that nothing is lost and nothing unproven loads."""
