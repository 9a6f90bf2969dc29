"""k3: long agent sessions on a local Kimi K3."""

__version__ = "0.1.0"
