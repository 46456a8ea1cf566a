"""Tell when SGD has equilibrated, act on it, and read the landscape off the fluctuations."""

__version__ = "0.1.0"
