"""What moves between this machine and the Hub: the demo model, its text, model cards, folders saved whole."""

from .demo_model import demo_model


__all__ = ["demo_model"]
