"""One file per stage, each with a constant STAGE; the runner sorts them by their order."""
