"""Measuring a model on this machine against what the machine can do: `k3 bench`."""
