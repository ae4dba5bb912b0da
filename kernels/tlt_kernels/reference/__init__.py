"""Torch references of the ops: slow, obvious, the specification that the other backends are held to."""
