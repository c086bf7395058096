"""etude: reinforcement learning of agent models inside their own harness."""

__version__ = "0.1.0"
