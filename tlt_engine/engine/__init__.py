"""The engine: engine.py is what callers use, core.py what a step does."""
