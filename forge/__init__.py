"""The compiler: BlueprintIR and a hardware target in, a packaged artifact out."""
