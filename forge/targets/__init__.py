"""Hardware as data: one file per target."""
